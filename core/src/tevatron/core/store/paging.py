"""Keyset pages, newest first: a cursor is the place of the last row, so inserts never shift a page."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Generic, TypeVar

from sqlalchemy import Select, tuple_
from sqlalchemy.orm import Session

from tevatron.core.errors import InputError
from tevatron.core.store.models import Owned

Item = TypeVar("Item")
Row = TypeVar("Row", bound=Owned)


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Some rows, and the cursor of those that follow; null at the end."""

    items: Sequence[Item]
    next_cursor: str | None


def page_of(
    session: Session,
    statement: Select[Row],
    table: type[Row],
    *,
    cursor: str | None,
    limit: int,
) -> Page[Row]:
    """Return up to `limit` rows of `statement`, newest first, after the row that `cursor` names."""
    place = tuple_(table.created_at, table.id)
    if cursor is not None:
        statement = statement.where(place < tuple_(*_decode(cursor)))
    found = session.scalars(
        statement.order_by(table.created_at.desc(), table.id.desc()).limit(limit + 1)
    ).all()
    items = found[:limit]
    return Page(items=items, next_cursor=_encode(items[-1]) if len(found) > limit else None)


def _encode(row: Owned) -> str:
    return base64.urlsafe_b64encode(f"{row.created_at.isoformat()}|{row.id}".encode()).decode()


def _decode(cursor: str) -> tuple[datetime, str]:
    try:
        time, _, row_id = base64.urlsafe_b64decode(cursor.encode()).decode().partition("|")
        place = datetime.fromisoformat(time)
    except (binascii.Error, ValueError) as error:
        raise InputError(
            f"cursor: expected a `next_cursor` of an earlier page, got '{cursor}'"
        ) from error
    if place.tzinfo is None or not row_id or "\0" in row_id:
        raise InputError(f"cursor: expected a `next_cursor` of an earlier page, got '{cursor}'")
    return place, row_id
