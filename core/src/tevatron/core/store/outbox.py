"""What moves jobs that nobody holds: the dispatcher's due list, waiting jobs, and those of dead workers.

The queued row is the outbox. A message is a wake-up only, so publishing one twice or losing one does no harm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NamedTuple

from pydantic import ValidationError
from sqlalchemy import exists, func, or_, select, update
from sqlalchemy.orm import Session, aliased

from tevatron.core.contracts.jobs import CLAIMED_STATES, FailReason, JobKind, JobState
from tevatron.core.contracts.sources import with_sources
from tevatron.core.store.checkpoints import CheckpointRepository
from tevatron.core.store.claims import SPEC
from tevatron.core.store.leases import lapsed_rows
from tevatron.core.store.lifecycle import move, take_back
from tevatron.core.store.models import Job, JobDependency
from tevatron.core.store.scorers import reap_scorers

_BATCH = 200


class DueJob(NamedTuple):
    """A queued job whose wake-up should go out."""

    job_id: str
    kind: JobKind
    published_before: bool
    """Its wake-up may still lie in the broker, behind a long job: publish again only when the list is empty."""


def due_jobs(session: Session, republish_s: float) -> list[DueJob]:
    """Lock and return queued jobs never published, or published `republish_s` ago or longer."""
    old = func.clock_timestamp() - timedelta(seconds=republish_s)
    rows = session.execute(
        select(Job.id, Job.kind, Job.published_at)
        .where(
            Job.state == JobState.QUEUED, or_(Job.published_at.is_(None), Job.published_at < old)
        )
        .order_by(Job.created_at, Job.id)
        .limit(_BATCH)
        .with_for_update(skip_locked=True)
    )
    return [DueJob(job_id, kind, published is not None) for job_id, kind, published in rows]


def mark_published(session: Session, job_ids: Sequence[str]) -> None:
    """Note that a wake-up for these has gone to the broker, or that one is there already."""
    session.execute(
        update(Job)
        .where(Job.id.in_(job_ids), Job.state == JobState.QUEUED)
        .values(published_at=func.clock_timestamp())
        .execution_options(synchronize_session=False)
    )


def settle_waiting(session: Session) -> list[str]:
    """Queue waiting jobs whose sources have succeeded; fail those with a source that did not. Return both."""
    source = aliased(Job)
    of_job = exists().where(JobDependency.job_id == Job.id, source.id == JobDependency.source_id)
    unfinished = of_job.where(source.state != JobState.SUCCEEDED)
    broken = of_job.where(source.state.in_((JobState.FAILED, JobState.CANCELLED)))
    jobs = session.scalars(
        select(Job)
        .where(Job.state == JobState.WAITING, or_(broken, ~unfinished))
        .order_by(Job.created_at, Job.id)
        .limit(_BATCH)
        .with_for_update(of=Job, skip_locked=True)
        .execution_options(populate_existing=True)
    ).all()
    for job in jobs:
        _settle(session, job)
    session.flush()
    return [job.id for job in jobs]


def _settle(session: Session, job: Job) -> None:
    sources = session.execute(
        select(JobDependency.source_name, Job.id, Job.name, Job.state)
        .join(Job, Job.id == JobDependency.source_id)
        .where(JobDependency.job_id == job.id)
    ).all()
    problem = None
    outputs: dict[str, str] = {}
    for name, source_id, own_name, state in sources:
        output = _output_of(session, source_id, wanted_by=job.kind)
        called = f"source job '{own_name or name}' ({source_id})"
        if state is not JobState.SUCCEEDED:
            problem = f"{called} is {state}"
        elif output is None:
            what = "dataset" if job.kind is JobKind.TRAIN else "checkpoint"
            problem = f"{called} has published no {what}"
        else:
            outputs[name] = output
    if problem is not None:
        move(session, job, JobState.FAILED, reason=FailReason.DEPENDENCY_FAILED, message=problem)
        return
    try:
        spec = with_sources(SPEC.validate_python(job.resolved), outputs)
    except ValidationError as error:
        # Stored by a build with another schema. Raised, it would keep every other job waiting as well.
        problem = f"this build cannot read the job's spec: {error}"
        move(session, job, JobState.FAILED, reason=FailReason.CONFIG_ERROR, message=problem)
        return
    job.resolved = spec.model_dump(mode="json", by_alias=True)
    move(session, job, JobState.QUEUED)


def _output_of(session: Session, job_id: str, *, wanted_by: JobKind) -> str | None:
    """Return the id of what the job has made, in the form that a job of the other kind uses."""
    if wanted_by is JobKind.EXPORT:
        # An export looks at the train job's saved states.
        return job_id
    if wanted_by is JobKind.TRAIN:
        result = session.get_one(Job, job_id).result or {}
        dataset_id = result.get("dataset_id")
        return dataset_id if isinstance(dataset_id, str) else None
    checkpoint = CheckpointRepository(session).of_job(job_id)
    return None if checkpoint is None else checkpoint.id


@dataclass(slots=True)
class Reaped:
    """What the reaper has done, by id."""

    requeued: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    scorers: list[str] = field(default_factory=list)


def reap(session: Session, *, grace_s: float, max_attempts: int) -> Reaped:
    """Take back jobs and scorers whose holder has been silent for its lease and `grace_s` more."""
    done = Reaped()
    for job in lapsed_rows(session, Job, states=CLAIMED_STATES, grace_s=grace_s):
        lost = f"attempt {job.attempt} was lost: nothing was heard of {job.holder}"
        state = take_back(session, job, message=lost, max_attempts=max_attempts)
        {
            JobState.CANCELLED: done.cancelled,
            JobState.FAILED: done.failed,
            JobState.QUEUED: done.requeued,
        }[state].append(job.id)
    session.flush()
    done.scorers = reap_scorers(session, grace_s=grace_s, max_attempts=max_attempts)
    return done
