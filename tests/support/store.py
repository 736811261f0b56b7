"""Rows that tests of jobs stand on: a model, datasets, a published checkpoint, queued jobs."""

from __future__ import annotations

from pydantic import JsonValue
from sqlalchemy import select
from sqlalchemy.orm import Session

from tevatron.core.contracts.jobs import EvalJob, TrainJob
from tevatron.core.store.checkpoints import CheckpointRepository, checkpoint_id_of
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.models import Checkpoint, DatasetKind, Job, JobEventRow
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.store.session import Sessions


def register(session: Session, *, key_id: str | None = None) -> None:
    """Register the model `base` and the datasets `train`, `corpus` (beir) and `run` (ranklist)."""
    ModelRepository(session).create("base", key_id=key_id, path="models/base", sha256="0" * 64)
    datasets = DatasetRepository(session)
    for name, kind, stats in (
        ("train", DatasetKind.TRAINING, {}),
        ("corpus", DatasetKind.BEIR, {"splits": {"dev": 1, "test": 2}}),
        ("run", DatasetKind.RANKLIST, {}),
    ):
        path = f"datasets/{name}"
        datasets.create(name, key_id=key_id, kind=kind, path=path, sha256="1" * 64, stats=stats)


def train_job(name: str | None = None, **fields: object) -> TrainJob:
    return TrainJob.model_validate({"name": name, "model": "base", "dataset": "train", **fields})


def eval_job(name: str | None = None, **fields: object) -> EvalJob:
    return EvalJob.model_validate({"name": name, "dataset": "corpus", **fields})


def submit(sessions: Sessions, **specs: TrainJob | EvalJob) -> list[str]:
    """Register what the specs of this module's functions need, store the jobs, return their ids."""
    with sessions.begin() as session:
        if session.scalar(select(Job.id).limit(1)) is None:
            register(session)
        return [job.id for job in JobRepository(session).submit(specs, key_id=None)]


def job(sessions: Sessions, job_id: str) -> Job:
    with sessions() as session:
        return session.get_one(Job, job_id)


def states(sessions: Sessions, job_id: str) -> list[str]:
    """Return the states that the job's events tell, in order."""
    with sessions() as session:
        rows = session.scalars(
            select(JobEventRow).where(JobEventRow.job_id == job_id).order_by(JobEventRow.seq)
        ).all()
        assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
        return [str(row.data["state"]) for row in rows if row.type == "state"]


def publish_checkpoint(
    session: Session,
    job_id: str,
    *,
    name: str | None = None,
    key_id: str | None = None,
    contract: dict[str, JsonValue] | None = None,
) -> str:
    """Store the row of a checkpoint that the job has published, and return its id."""
    checkpoint = Checkpoint(
        id=checkpoint_id_of(job_id),
        name=name,
        key_id=key_id,
        job_id=job_id,
        path=f"checkpoints/{checkpoint_id_of(job_id)}",
        contract={"schema_version": 1, **(contract or {})},
        sha256="2" * 64,
        size_bytes=1,
    )
    CheckpointRepository(session).add(checkpoint)
    return checkpoint.id
