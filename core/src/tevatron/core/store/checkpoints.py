"""Published checkpoints: one a job, added in the transaction in which the job succeeds."""

from __future__ import annotations

from typing import ClassVar

from sqlalchemy import select

from tevatron.core.contracts.checkpoint import check_dtype
from tevatron.core.errors import ConfigError
from tevatron.core.store.models import Checkpoint, Job
from tevatron.core.store.repository import KeyScope, Repository


def checkpoint_id_of(job_id: str) -> str:
    """Return the id of the checkpoint that this job publishes: a second attempt cannot publish another."""
    return f"ckpt_{job_id.partition('_')[2]}"


class CheckpointRepository(Repository[Checkpoint]):
    """Checkpoints."""

    table = Checkpoint
    noun: ClassVar[str] = "checkpoint"

    def add(self, checkpoint: Checkpoint) -> None:
        """Store the row; its folder is in its place already."""
        self._session.add(checkpoint)
        self._session.flush()

    def get_servable(self, ref: str, *, key_id: KeyScope, dtype: str | None) -> Checkpoint:
        """Return a checkpoint that a scorer can serve in this arithmetic, its own when None."""
        checkpoint = self.get(ref, key_id=key_id)
        if self._session.get_one(Job, checkpoint.job_id).resolved.get("form") == "adapter":
            raise ConfigError(
                f"checkpoint '{ref}' is an adapter alone, which no scorer serves; export it in form 'merged'"
            )
        proved = checkpoint.contract.get("tolerance")
        if dtype is not None and isinstance(proved, dict):
            check_dtype(proved, dtype)
        return checkpoint

    def of_job(self, job_id: str) -> Checkpoint | None:
        """Return what this job has published."""
        return self._session.scalars(select(Checkpoint).where(Checkpoint.job_id == job_id)).first()
