"""From a scorer row to the server's arguments. Reads rows of checkpoints and models, and changes none."""

from __future__ import annotations

from sqlalchemy.orm import Session

from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.core.store.checkpoints import CheckpointRepository
from tevatron.core.store.registered import ModelRepository
from tevatron.core.store.scorers import ScorerTarget


def server_arguments(session: Session, target: ScorerTarget, settings: Settings) -> list[str]:
    """Return the command line of the server for this target; what cannot be served is a `ConfigError`."""
    model, revision = _model(session, target, settings)
    arguments = ["--backend", target.engine, "--model", model]
    for flag, value in (
        ("--revision", revision),
        ("--dtype", target.dtype),
        ("--prompt_template", target.prompt_template),
        ("--rerank_max_len", target.max_length),
        ("--device", "cpu" if settings.devices == "cpu" else None),
    ):
        if value is not None:
            arguments += [flag, str(value)]
    return arguments


def _model(session: Session, target: ScorerTarget, settings: Settings) -> tuple[str, str | None]:
    """Return the folder, or the hub id with its revision, which the server fetches."""
    if target.checkpoint_id is not None:
        path = CheckpointRepository(session).by_id(target.checkpoint_id).path
    else:
        assert target.model_id is not None, "a check constraint of the table"
        model = ModelRepository(session).by_id(target.model_id)
        if model.path is None:
            return str(model.hub_id), model.hub_revision
        path = model.path
    folder = settings.data / path
    if not folder.is_dir():
        raise ConfigError(
            f"the folder of {target.checkpoint_id or target.model_id} is not there: {folder}"
        )
    return str(folder), None
