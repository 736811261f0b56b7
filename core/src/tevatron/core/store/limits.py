"""How many jobs of one key may be queued and may run at a time; none for jobs made without a key.

Both counts are taken under a lock on the key's row, so that two submissions, or two workers, cannot both see the last
place free. Knows no state machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from tevatron.core.contracts.jobs import CLAIMED_STATES, JobState
from tevatron.core.errors import BusyError
from tevatron.core.store.models import ApiKey, Job

QUEUED_STATES = (JobState.WAITING, JobState.QUEUED)
RETRY_AFTER_S = 30


class TooManyJobsError(BusyError):
    """The key has as many jobs in the queue as it may."""

    code = "too_many_jobs"


def check_max_queued(session: Session, key_id: str | None) -> None:
    """Refuse what this transaction has queued if it is more than the key may have waiting and queued."""
    # Locked before the count, which then sees what another submission has committed.
    limit = session.scalar(
        select(ApiKey.max_queued)
        .where(ApiKey.id == key_id, ApiKey.max_queued.is_not(None))
        .with_for_update(key_share=True)
    )
    if limit is None:
        return
    count = select(func.count()).where(Job.key_id == key_id, Job.state.in_(QUEUED_STATES))
    num_queued = session.scalars(count).one()
    if num_queued > limit:
        raise TooManyJobsError(
            f"with this request the key would have {num_queued} jobs waiting or queued, and it may have {limit} (max_queued)",
            retry_after_s=RETRY_AFTER_S,
        )


def lock_running(session: Session) -> None:
    """Make other claims wait until this one is committed, where any key has a limit of running jobs."""
    session.execute(
        select(ApiKey.id)
        .where(ApiKey.max_running.is_not(None))
        .order_by(ApiKey.id)
        .with_for_update(key_share=True)
    )


def may_run() -> ColumnElement[bool]:
    """Match jobs whose key runs fewer than it may."""
    full = (
        select(Job.key_id)
        .join(ApiKey, ApiKey.id == Job.key_id)
        .where(ApiKey.max_running.is_not(None), Job.state.in_(CLAIMED_STATES))
        .group_by(Job.key_id, ApiKey.max_running)
        .having(func.count() >= ApiKey.max_running)
    )
    return or_(Job.key_id.is_(None), Job.key_id.not_in(full))


def held_back(session: Session, job_ids: Sequence[str]) -> dict[str, str]:
    """Say for each queued job of these that its key holds back why; others are left out."""
    rows = session.execute(
        select(Job.id, ApiKey.max_running)
        .join(ApiKey, ApiKey.id == Job.key_id)
        .where(Job.id.in_(job_ids), Job.state == JobState.QUEUED, ~may_run())
    )
    return {
        job_id: f"its key runs {limit}, as many as it may (max_running)" for job_id, limit in rows
    }
