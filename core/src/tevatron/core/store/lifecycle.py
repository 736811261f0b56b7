"""A job's states and its history: which state follows which, and the event that every change leaves.

    waiting -> queued -> starting -> running -> succeeded | failed
    waiting, queued ------------------------> cancelled
    starting, running -> cancelling --------> cancelled
    starting, running -> queued               a shutdown let it go, or the reaper found its worker dead
    cancelled, failed -> queued, waiting      somebody resumed it

`succeeded`, `failed` and `cancelled` are final: nothing but a user's request goes on from there. `move` and `add_events` expect that the caller's transaction has locked the job's row: that
is what keeps `seq` without gaps. A webhook's delivery is stored with the end that it tells. Knows nothing of leases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import JsonValue
from sqlalchemy import insert
from sqlalchemy.orm import Session

from tevatron.core.contracts.jobs import FINAL_STATES, EventType, FailReason, JobState, Phase
from tevatron.core.errors import ConflictError
from tevatron.core.store.deliveries import add_deliveries
from tevatron.core.store.models import Job, JobEventRow
from tevatron.core.store.nudges import nudge

NEXT: dict[JobState, frozenset[JobState]] = {
    JobState.WAITING: frozenset({JobState.QUEUED, JobState.CANCELLED, JobState.FAILED}),
    JobState.QUEUED: frozenset({JobState.STARTING, JobState.CANCELLED}),
    JobState.STARTING: frozenset(
        {
            JobState.RUNNING,
            JobState.QUEUED,
            JobState.CANCELLING,
            JobState.SUCCEEDED,
            JobState.FAILED,
        }
    ),
    JobState.RUNNING: frozenset(
        {JobState.QUEUED, JobState.CANCELLING, JobState.SUCCEEDED, JobState.FAILED}
    ),
    JobState.CANCELLING: frozenset({JobState.CANCELLED}),
    JobState.CANCELLED: frozenset({JobState.QUEUED, JobState.WAITING}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset({JobState.QUEUED, JobState.WAITING}),
}


@dataclass(frozen=True, slots=True)
class NewEvent:
    """An event that is not stored yet."""

    type: EventType
    data: dict[str, JsonValue]
    time: datetime = field(default_factory=lambda: datetime.now(UTC))


def move(
    session: Session,
    job: Job,
    state: JobState,
    *,
    reason: FailReason | None = None,
    phase: Phase | None = None,
    message: str | None = None,
) -> None:
    """Change the job's state and leave the event.

    Args:
        phase: Where it failed; the job's last phase when unset.
        message: Why, for people.
    """
    if state not in NEXT[job.state]:
        raise ConflictError(f"job {job.id} is {job.state}; it cannot become {state}")
    job.state = state
    job.reason = reason
    job.message = None if message is None else str(storable(message))
    now = datetime.now(UTC)
    _stamp(job, state, now)
    if state is JobState.FAILED:
        job.phase = phase or job.phase
    if state is JobState.QUEUED or state in FINAL_STATES:
        # There is a job to wake a worker for, or one that waited for this end.
        nudge(session)
    data: dict[str, JsonValue] = {"state": state.value}
    if reason is not None:
        data |= {"reason": reason.value, "phase": job.phase.value if job.phase else None}
    if message is not None:
        data["message"] = job.message
    add_events(session, job, [NewEvent(EventType.STATE, data, now)])
    if state in FINAL_STATES:
        add_deliveries(session, job, now)


def _stamp(job: Job, state: JobState, now: datetime) -> None:
    """Write down when the state began, and drop what belonged to the one before."""
    if state is JobState.STARTING:
        job.started_at = job.started_at or now
    elif state is JobState.QUEUED:
        job.phase = job.published_at = job.lease_until = job.holder = None
        # The attempt that was asked for a state is over, and has saved one or not.
        job.save_requested_at = None
    elif state is JobState.CANCELLING:
        job.cancel_requested_at = now
    elif state in FINAL_STATES:
        job.finished_at = now
        job.lease_until = None


def begin_again(session: Session, job: Job, *, has_sources: bool) -> None:
    """Go on with a job that was cancelled or has failed; its lost attempts are forgiven."""
    move(session, job, JobState.WAITING if has_sources else JobState.QUEUED)
    job.finished_at = job.cancel_requested_at = job.stop_requested_at = None
    job.lost_attempts = 0


def take_back(session: Session, job: Job, *, message: str, max_attempts: int) -> JobState:
    """Count the attempt as lost and queue the job again, or end it where that was one too many; return its state."""
    job.lost_attempts += 1
    if job.state is JobState.CANCELLING:
        move(session, job, JobState.CANCELLED, message=message)
    elif job.lost_attempts >= max_attempts:
        limit = f"{job.lost_attempts} attempts are lost, the limit is {max_attempts}; the last: "
        move(session, job, JobState.FAILED, reason=FailReason.WORKER_LOST, message=limit + message)
    else:
        move(session, job, JobState.QUEUED, message=message)
    return job.state


def add_events(session: Session, job: Job, events: Sequence[NewEvent]) -> None:
    """Append to the job's history."""
    if not events:
        return
    first = job.last_seq + 1
    job.last_seq += len(events)
    session.flush()
    session.execute(
        insert(JobEventRow),
        [
            {
                "job_id": job.id,
                "seq": seq,
                "time": event.time,
                "attempt": job.attempt,
                "type": event.type,
                "data": storable(event.data),
            }
            for seq, event in enumerate(events, first)
        ],
    )


def storable(value: JsonValue) -> JsonValue:
    """Return `value` as Postgres can hold it: without NUL characters, NaN and infinities as text."""
    if isinstance(value, str):
        # A lone surrogate (a file name that is not UTF-8) cannot be encoded either.
        return value.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [storable(item) for item in value]
    if isinstance(value, dict):
        return {str(storable(key)): storable(item) for key, item in value.items()}
    return value
