"""From a scorer row to the server's arguments. Reads rows of checkpoints and models, and changes none."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.orm import Session

from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.core.store.checkpoints import CheckpointRepository
from tevatron.core.store.registered import ModelRepository
from tevatron.core.store.scorers import ScorerTarget


def server_arguments(session: Session, target: ScorerTarget, settings: Settings) -> list[str]:
    """Return the command line of the server for this target; what cannot be served is a `ConfigError`."""
    folder = settings.data / _folder(session, target)
    if not folder.is_dir():
        raise ConfigError(
            f"the folder of {target.checkpoint_id or target.model_id} is not there: {folder}"
        )
    arguments = ["--backend", target.engine, "--model", str(folder)]
    for flag, value in (
        ("--dtype", target.dtype),
        ("--prompt_template", target.prompt_template),
        ("--rerank_max_len", target.max_length),
        ("--device", "cpu" if settings.devices == "cpu" else None),
    ):
        if value is not None:
            arguments += [flag, str(value)]
    return arguments


def _folder(session: Session, target: ScorerTarget) -> Path:
    """Return the key below TEVATRON_DATA, or an absolute path."""
    if target.checkpoint_id is not None:
        return Path(CheckpointRepository(session).by_id(target.checkpoint_id).path)
    assert target.model_id is not None, "a check constraint of the table"
    model = ModelRepository(session).by_id(target.model_id)
    if model.path is None:
        raise ConfigError(
            f"model '{model.name}' is a hub id ({model.hub_id}); this host serves folders: register its folder"
        )
    return Path(model.path)
