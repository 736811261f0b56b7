"""From a scorer row to the server's arguments. Reads rows of checkpoints and models, and changes none."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from sqlalchemy.orm import Session

from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.core.store.checkpoints import CheckpointRepository
from tevatron.core.store.models import Checkpoint, Model
from tevatron.core.store.registered import ModelRepository
from tevatron.core.store.scorers import ScorerTarget


def engines(settings: Settings) -> list[str]:
    """Return the engines that this host can start."""
    has_vllm = settings.vllm_python is not None or find_spec("vllm") is not None
    found = ["hf"] if find_spec("transformers") is not None else []
    return [*found, "vllm"] if has_vllm else found


def interpreter(engine: str, settings: Settings) -> str:
    """Return the Python that starts a server of this engine."""
    if engine == "vllm" and settings.vllm_python is not None:
        return str(settings.vllm_python)
    return sys.executable


def server_arguments(session: Session, target: ScorerTarget, settings: Settings) -> list[str]:
    """Return the command line of the server for this target; what cannot be served is a `ConfigError`."""
    arguments = ["--backend", target.engine, *_model(session, target, settings)]
    for flag, value in (
        ("--dtype", target.dtype),
        ("--prompt_template", target.prompt_template),
        ("--rerank_max_len", target.max_length),
        ("--device", "cpu" if settings.devices == "cpu" else None),
    ):
        if value is not None:
            arguments += [flag, str(value)]
    return arguments


def _model(session: Session, target: ScorerTarget, settings: Settings) -> list[str]:
    if target.checkpoint_id is None:
        assert target.model_id is not None, "a check constraint of the table"
        return _registered(ModelRepository(session).by_id(target.model_id), settings)
    checkpoint = CheckpointRepository(session).by_id(target.checkpoint_id)
    folder = _folder(checkpoint.id, checkpoint.path, settings)
    if not _is_adapter(folder):
        return ["--model", str(folder)]
    base = _registered(_base_of(session, checkpoint), settings)
    return [*base, "--lora_name_or_path", str(folder)]


def _registered(model: Model, settings: Settings) -> list[str]:
    """Name a model's folder, or its hub id with the revision, which the server fetches."""
    if model.path is not None:
        return ["--model", str(_folder(model.id, model.path, settings))]
    revision = [] if model.hub_revision is None else ["--revision", model.hub_revision]
    return ["--model", str(model.hub_id), *revision]


def _base_of(session: Session, checkpoint: Checkpoint) -> Model:
    """Return the model that an adapter was trained on: a job writes its hub id or its name into the contract."""
    name = str(checkpoint.contract.get("base_model"))
    model = ModelRepository(session).find_base(name, key_id=checkpoint.key_id)
    if model is None:
        raise ConfigError(
            f"{checkpoint.id} is an adapter of the model '{name}', which is not registered any more"
        )
    return model


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def _folder(name: str, path: str, settings: Settings) -> Path:
    folder = settings.data / path
    if not folder.is_dir():
        raise ConfigError(f"the folder of {name} is not there: {folder}")
    return folder
