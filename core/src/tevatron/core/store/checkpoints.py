"""Published checkpoints: one a job, added in the transaction in which the job succeeds."""

from __future__ import annotations

from typing import ClassVar

from sqlalchemy import select

from tevatron.core.store.models import Checkpoint
from tevatron.core.store.repository import Repository


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

    def of_job(self, job_id: str) -> Checkpoint | None:
        """Return what this job has published."""
        return self._session.scalars(select(Checkpoint).where(Checkpoint.job_id == job_id)).first()
