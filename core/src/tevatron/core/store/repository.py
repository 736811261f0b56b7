"""What the repositories of models, datasets, checkpoints, scorers, evaluations and webhooks share.

A row is visible to the key that made it, and to an administrator. Whoever may read a row may use it in a job; what
comes of it belongs to who asked for it. `get` takes what a user wrote (an id or a name), `by_id` what a worker found in a
resolved spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from sqlalchemy import ColumnElement, Select, select, true
from sqlalchemy.orm import InstrumentedAttribute, Session

from tevatron.core.errors import NotFoundError, unknown_name
from tevatron.core.store.models import Checkpoint, Dataset, Evaluation, Job, Model, Scorer, Webhook
from tevatron.core.store.paging import Page, page_of

Row = TypeVar("Row", Job, Model, Dataset, Checkpoint, Scorer, Evaluation, Webhook)

MAX_NAMES = 50
"""Names that an error about an unknown one lists and compares, newest first."""


@dataclass(frozen=True, slots=True)
class EveryKey:
    """The scope of an administrator, who reads the rows of every key, those made without one among them."""

    own: str | None = None
    """The administrator's own key: of rows with the same name its own comes first, and what it makes is its own."""


KeyScope = str | None | EveryKey
"""Whose rows are meant: one key's, those made without a key (null), or all."""


def owner_of(key_id: KeyScope) -> str | None:
    """Return the key to which belongs what is made in this scope."""
    return key_id.own if isinstance(key_id, EveryKey) else key_id


def owned_by(column: InstrumentedAttribute[str | None], key_id: KeyScope) -> ColumnElement[bool]:
    """Match the rows of a key; without a key, those made without one."""
    if isinstance(key_id, EveryKey):
        return true()
    return column.is_(None) if key_id is None else column == key_id


class Repository(Generic[Row]):
    """Rows of one table within the caller's transaction."""

    table: type[Row]
    noun: ClassVar[str]

    def __init__(self, session: Session) -> None:
        self._session = session

    def by_id(self, row_id: str) -> Row:
        """Return the row, whoever owns it: for workers, not for what a user sent."""
        row = self._session.get(self.table, row_id)
        if row is None:
            raise NotFoundError(f"{self.noun} '{row_id}' is gone")
        return row

    def get(self, ref: str, *, key_id: KeyScope) -> Row:
        """Return the key's row with this id, or else its newest with this name."""
        table, mine = self.table, self._visible(key_id)
        # Two queries, each on an index: `id = ref OR name = ref` would read all of the key's rows.
        row = self._session.scalars(mine.where(table.id == ref)).first()
        if row is None:
            row = self._session.scalars(
                mine.where(table.name == ref)
                .order_by(*self._own_first(key_id), table.created_at.desc(), table.id.desc())
                .limit(1)
            ).first()
        if row is None:
            raise NotFoundError(unknown_name(self.noun, ref, self._names(key_id)))
        return row

    def list_page(
        self, *, key_id: KeyScope, cursor: str | None = None, limit: int = 50
    ) -> Page[Row]:
        """Return the key's rows, newest first."""
        return page_of(self._session, self._visible(key_id), self.table, cursor=cursor, limit=limit)

    def _visible(self, key_id: KeyScope) -> Select[Row]:
        return select(self.table).where(owned_by(self.table.key_id, key_id))

    def _own_first(self, key_id: KeyScope) -> list[ColumnElement[bool]]:
        if not isinstance(key_id, EveryKey):
            return []
        return [owned_by(self.table.key_id, key_id.own).desc()]

    def _names(self, key_id: KeyScope) -> set[str]:
        newest = self._session.scalars(
            self._visible(key_id).order_by(self.table.created_at.desc()).limit(MAX_NAMES)
        )
        return {row.name or row.id for row in newest}
