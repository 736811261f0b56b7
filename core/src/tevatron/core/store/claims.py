"""A worker's side of a job's life: claim, heartbeat, events, and the end. Every write is guarded by id and fence.

The final writes may be repeated when the answer to a commit was lost: the second one finds its own and does nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from pydantic import JsonValue, TypeAdapter, ValidationError
from sqlalchemy import ColumnElement, and_, select
from sqlalchemy.orm import Session

from tevatron.core.contracts.jobs import (
    CLAIMED_STATES,
    AnyJob,
    EventType,
    FailReason,
    JobKind,
    JobSpec,
    JobState,
    Phase,
)
from tevatron.core.errors import ConflictError
from tevatron.core.store.leases import LeaseLostError, claim_row, held_row, renew
from tevatron.core.store.lifecycle import NewEvent, add_events, move, storable, take_back
from tevatron.core.store.limits import lock_running, may_run
from tevatron.core.store.models import Job, JobEventRow

SPEC: TypeAdapter[AnyJob] = TypeAdapter(JobSpec)

STARTING_PHASES = frozenset({Phase.PREPARING, Phase.LOADING})
"""Phases in which a job is still `starting`."""


class CancelRequestedError(ConflictError):
    """The job cannot succeed any more: somebody cancelled it first."""

    code = "cancel_requested"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One attempt at a job, held until its lease is over."""

    job_id: str
    kind: JobKind
    name: str | None
    key_id: str | None
    attempt: int
    fence: int
    spec: AnyJob
    """With ids in place of names and of `{from: name}`."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat learns."""

    cancel_requested: bool
    save_requested_at: datetime | None
    stop_requested_at: datetime | None


def claim_next_job(
    session: Session, kinds: Collection[JobKind], *, worker: str, lease_s: float
) -> Claim | None:
    """Claim the queued job of these kinds that has the highest priority, of several the oldest; its next attempt starts.

    A job whose key runs as many as it may is passed over.
    """
    lock_running(session)
    where: ColumnElement[bool] = and_(Job.state == JobState.QUEUED, Job.kind.in_(kinds), may_run())
    first = (Job.priority.desc(),)
    while (
        job := claim_row(session, Job, where, holder=worker, lease_s=lease_s, first=first)
    ) is not None:
        job.attempt += 1
        move(session, job, JobState.STARTING)
        try:
            spec = SPEC.validate_python(job.resolved)
        except ValidationError as error:
            # Stored by a build with another schema. Left queued it would block all jobs behind it.
            message = f"this build cannot read the job's spec: {error}"
            move(session, job, JobState.FAILED, reason=FailReason.CONFIG_ERROR, message=message)
            session.flush()
            continue
        return Claim(
            job_id=job.id,
            kind=job.kind,
            name=job.name,
            key_id=job.key_id,
            attempt=job.attempt,
            fence=job.fence,
            spec=spec,
        )
    return None


def heartbeat(session: Session, claim: Claim, lease_s: float) -> Beat:
    """Renew the lease, and learn what was asked of the job."""
    renew(session, Job, claim.job_id, fence=claim.fence, states=CLAIMED_STATES, lease_s=lease_s)
    return look(session, claim)


def look(session: Session, claim: Claim) -> Beat:
    """Learn what was asked of the job, without a write."""
    row = session.execute(
        select(Job.state, Job.save_requested_at, Job.stop_requested_at).where(
            Job.id == claim.job_id, Job.fence == claim.fence, Job.state.in_(CLAIMED_STATES)
        )
    ).one_or_none()
    if row is None:
        raise LeaseLostError(f"{claim.job_id} is not held under fence {claim.fence} any more")
    state, save_requested_at, stop_requested_at = row
    return Beat(
        cancel_requested=state == JobState.CANCELLING,
        save_requested_at=save_requested_at,
        stop_requested_at=stop_requested_at,
    )


def append_events(
    session: Session, claim: Claim, events: Sequence[NewEvent], *, in_doubt: bool = False
) -> None:
    """Append to the job's history; the first phase beyond the start makes the job `running`.

    Args:
        in_doubt: These were sent before and the answer was lost: do nothing if they are there.
    """
    job = _held(session, claim)
    if in_doubt and _is_stored(session, job, events[0]):
        return
    batch: list[NewEvent] = []
    for event in events:
        if event.type is EventType.PHASE:
            phase = Phase(str(event.data["phase"]))
            if job.state is JobState.STARTING and phase not in STARTING_PHASES:
                add_events(session, job, batch)
                move(session, job, JobState.RUNNING)
                batch = []
            job.phase = phase
        batch.append(event)
    add_events(session, job, batch)


def succeed(session: Session, claim: Claim, result: dict[str, JsonValue]) -> bool:
    """End the job well; False when this very claim has done so already.

    Raises:
        CancelRequestedError: A cancel came first; `finish_cancelled` is what is left.
    """
    job = _ending(session, claim, JobState.SUCCEEDED)
    if job is None:
        return False
    if job.state is JobState.CANCELLING:
        raise CancelRequestedError(f"job {job.id} was cancelled before it succeeded")
    cleaned = storable(result)
    assert isinstance(cleaned, dict)
    job.result = cleaned
    move(session, job, JobState.SUCCEEDED)
    return True


def fail(
    session: Session, claim: Claim, *, reason: FailReason, phase: Phase | None = None, message: str
) -> None:
    """End the job badly; one that was cancelled meanwhile is cancelled."""
    job = _ending(session, claim, JobState.FAILED)
    if job is None:
        return
    if job.state is JobState.CANCELLING:
        move(session, job, JobState.CANCELLED, message=message)
    else:
        move(session, job, JobState.FAILED, reason=reason, phase=phase, message=message)


def finish_cancelled(session: Session, claim: Claim) -> None:
    """Say that no process of the cancelled job is left."""
    job = _ending(session, claim, JobState.CANCELLED)
    if job is not None:
        move(session, job, JobState.CANCELLED)


def release(session: Session, claim: Claim) -> None:
    """Give the job back for another worker: this one shuts down. The attempt does not count as lost."""
    job = _ending(session, claim, JobState.QUEUED)
    if job is None:
        return
    if job.state is JobState.CANCELLING:
        move(session, job, JobState.CANCELLED)
    else:
        move(session, job, JobState.QUEUED, message="released: its worker shuts down")


def lose(session: Session, claim: Claim, *, message: str, max_attempts: int) -> None:
    """Give the job back because what it ran was killed; the attempt counts as lost."""
    job = _ending(session, claim, JobState.QUEUED)
    if job is not None:
        take_back(session, job, message=message, max_attempts=max_attempts)


def _held(session: Session, claim: Claim) -> Job:
    return held_row(session, Job, claim.job_id, fence=claim.fence, states=CLAIMED_STATES)


def _ending(session: Session, claim: Claim, state: JobState) -> Job | None:
    """Return the held row, or nothing when this claim has brought it into `state` already."""
    job = held_row(session, Job, claim.job_id, fence=claim.fence, states=CLAIMED_STATES | {state})
    return job if job.state in CLAIMED_STATES else None


def _is_stored(session: Session, job: Job, event: NewEvent) -> bool:
    same = select(JobEventRow.seq).where(
        JobEventRow.job_id == job.id,
        JobEventRow.attempt == job.attempt,
        JobEventRow.type == event.type,
        JobEventRow.time == event.time,
    )
    return session.scalar(same.limit(1)) is not None
