"""Turns a whole export into the job's one checkpoint: flushed, renamed into place, and stored with the job's end.

The rename and the row belong to one transaction that begins by locking the job: a cancelled job or a lost lease
publishes nothing. A crash between rename and commit leaves a whole folder without a row; the next attempt takes it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from pydantic import JsonValue
from sqlalchemy.orm import Session

from tevatron.core.contracts.checkpoint import CONTRACT_NAME, read_contract
from tevatron.core.contracts.jobs import FailReason, JobKind, Phase
from tevatron.core.contracts.run import EXPORT_NAME
from tevatron.core.errors import ConfigError, InputError, JobError
from tevatron.core.formats.files import sha256_tree
from tevatron.core.hub import send_model
from tevatron.core.remote import hub_repository, send_folder
from tevatron.core.settings import Settings
from tevatron.core.store.checkpoints import CheckpointRepository, checkpoint_id_of
from tevatron.core.store.models import Checkpoint
from tevatron.core.worker.runner import Finished, JobContext, StopReason
from tevatron.trainer.run_folder import RunFolder, is_checkpoint, sync_tree
from tevatron.trainer.watch import exported_step

CHECKPOINTS = "checkpoints"
"""Folder of the published checkpoints below TEVATRON_DATA."""
WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json")
"""Files that make another model of a repository where an earlier push has left them."""


def published_folder(settings: Settings, job_id: str) -> Path:
    """Return where the checkpoint of this job lies once it is published."""
    return settings.data / CHECKPOINTS / checkpoint_id_of(job_id)


def has_output(settings: Settings, run: RunFolder, job_id: str) -> bool:
    """Say whether an earlier attempt made the whole checkpoint, so that only publishing is left."""
    return is_checkpoint(published_folder(settings, job_id)) or is_checkpoint(run.export)


def publish(ctx: JobContext, run: RunFolder, *, to: str | None = None) -> Finished:
    """Prepare the checkpoint; what is returned publishes it in the transaction that ends the job.

    Args:
        to: URL of a folder into which it is copied before.
    """
    ctx.phase(Phase.PUBLISHING)
    claim = ctx.claim
    destination = published_folder(ctx.settings, claim.job_id)
    source = destination if destination.exists() else run.export
    if not is_checkpoint(source):
        raise JobError(
            f"{source}: expected a whole checkpoint, with {CONTRACT_NAME} and *.safetensors",
            reason=FailReason.INTERNAL_ERROR,
            phase=Phase.PUBLISHING,
        )
    sync_tree(source)
    contract = read_contract(source)
    assert contract is not None
    sha256 = sha256_tree(source)
    size_bytes = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())

    def write(session: Session) -> None:
        if not destination.exists():
            _rename(run.export, destination)
        checkpoint = Checkpoint(
            id=checkpoint_id_of(claim.job_id),
            key_id=claim.key_id,
            name=claim.name,
            job_id=claim.job_id,
            path=str(destination.relative_to(ctx.settings.data)),
            contract=contract.model_dump(mode="json"),
            sha256=sha256,
            size_bytes=size_bytes,
        )
        CheckpointRepository(session).add(checkpoint)

    def discard() -> None:
        # Only where an earlier attempt died between rename and commit: else nothing was renamed yet.
        if destination.exists():
            # By a rename first: a half-removed folder is never seen. A leftover goes with the next attempt.
            leftover = run.path / f"{EXPORT_NAME}.discarded"
            destination.rename(leftover)
            shutil.rmtree(leftover)

    if ctx.stop_reason is StopReason.CANCELLED:
        discard()
    ctx.check()
    result: dict[str, JsonValue] = {
        "checkpoint_id": checkpoint_id_of(claim.job_id),
        "step": exported_step(run.events),
    }
    if to is not None:
        result |= _send(source, to)
    if claim.kind is JobKind.TRAIN:
        # A wrong step of an export is refused by them when it is submitted.
        result["saved_steps"] = [*run.saved_steps()]
    return Finished(result=result, write=write, discard=discard)


def _send(folder: Path, url: str) -> dict[str, JsonValue]:
    """Copy the checkpoint to a URL, or push it to the hub; return what the job's result says about it."""
    try:
        repository = hub_repository(url, field="to")
        if repository is not None:
            return {"url": url, "commit": send_model(folder, repository, stale=WEIGHTS)}
        send_folder(folder, url, last=CONTRACT_NAME)
        return {"url": url}
    except (ConfigError, InputError) as error:
        raise JobError(
            str(error), reason=FailReason.CONFIG_ERROR, phase=Phase.PUBLISHING
        ) from error


def _rename(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    source.rename(destination)
    for folder in (source.parent, destination.parent):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
