"""Claiming a row for a while: lease, fencing token, heartbeat; the same for jobs and scorers.

A claim raises the row's `fence`; every later write of the holder names row and fence, and finds nothing once the row
was taken back. Time is the database's own. Knows no state of either table: callers give the conditions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeVar

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session

from tevatron.core.errors import TevatronError
from tevatron.core.store.models import Job, Scorer

Row = TypeVar("Row", Job, Scorer)


class LeaseLostError(TevatronError):
    """The row was taken back: another may hold it now, and nothing may be written any more."""

    code = "lease_lost"


def claim_row(
    session: Session,
    table: type[Row],
    where: ColumnElement[bool],
    *,
    holder: str,
    lease_s: float,
    first: Sequence[ColumnElement[int]] = (),
) -> Row | None:
    """Take the oldest row that matches and that nobody else is just taking.

    Args:
        first: What comes before age in the order.
    """
    row = session.scalars(
        select(table)
        .where(where)
        .order_by(*first, table.created_at, table.id)
        .limit(1)
        .with_for_update(skip_locked=True)
        .execution_options(populate_existing=True)
    ).first()
    if row is None:
        return None
    row.fence += 1
    row.holder = holder
    row.lease_until = _in(session, lease_s)
    return row


def held_row(
    session: Session, table: type[Row], row_id: str, *, fence: int, states: Collection[StrEnum]
) -> Row:
    """Lock and return the row of a claim, or raise `LeaseLostError`."""
    row = session.scalars(
        select(table)
        .where(table.id == row_id, table.fence == fence, table.state.in_(states))
        .with_for_update()
        .execution_options(populate_existing=True)
    ).first()
    if row is None:
        raise LeaseLostError(f"{row_id} is not held under fence {fence} any more")
    return row


def renew(
    session: Session,
    table: type[Row],
    row_id: str,
    *,
    fence: int,
    states: Collection[StrEnum],
    lease_s: float,
) -> StrEnum:
    """Extend the lease and return the row's state, or raise `LeaseLostError`."""
    state: StrEnum | None = session.scalar(
        update(table)
        .where(table.id == row_id, table.fence == fence, table.state.in_(states))
        .values(lease_until=func.clock_timestamp() + timedelta(seconds=lease_s))
        .returning(table.state)
        .execution_options(synchronize_session=False)
    )
    if state is None:
        raise LeaseLostError(f"{row_id} is not held under fence {fence} any more")
    return state


def lapsed_rows(
    session: Session,
    table: type[Row],
    *,
    states: Collection[StrEnum],
    grace_s: float,
    limit: int = 100,
) -> Sequence[Row]:
    """Lock and return rows whose lease ended `grace_s` ago or longer."""
    return session.scalars(
        select(table)
        .where(
            table.state.in_(states),
            table.lease_until < func.clock_timestamp() - timedelta(seconds=grace_s),
        )
        .order_by(table.lease_until)
        .limit(limit)
        .with_for_update(skip_locked=True)
        .execution_options(populate_existing=True)
    ).all()


def _in(session: Session, seconds: float) -> datetime:
    now: datetime = session.scalars(select(func.clock_timestamp())).one()
    return now + timedelta(seconds=seconds)
