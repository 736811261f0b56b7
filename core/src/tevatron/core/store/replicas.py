"""What the rows of one scorer say together: each is a replica. Changes none of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, ScalarSelect, exists, func, select
from sqlalchemy.orm import aliased

from tevatron.core.store.models import Scorer, ScorerState

_BEST_FIRST = (
    ScorerState.READY,
    ScorerState.STARTING,
    ScorerState.WANTED,
    ScorerState.STOPPING,
    ScorerState.FAILED,
    ScorerState.STOPPED,
)


@dataclass(frozen=True, slots=True)
class Replicas:
    """All rows of one scorer, the first first."""

    rows: Sequence[Scorer]

    @property
    def first(self) -> Scorer:
        """What was asked for; its id and name are the scorer's."""
        return self.rows[0]

    @property
    def best(self) -> Scorer:
        """The replica that is furthest: the scorer is ready as soon as one is, and failed once none can be."""
        return min(self.rows, key=lambda row: (_BEST_FIRST.index(row.state), row.replica))

    @property
    def num_ready(self) -> int:
        """How many answer."""
        return sum(row.state is ScorerState.READY for row in self.rows)

    @property
    def last_used_at(self) -> datetime:
        """When the scorer was last used, or a replica became ready."""
        return max(row.last_used_at for row in self.rows)


def any_replica(
    states: Collection[ScorerState], *, of: type[Scorer] = Scorer
) -> ColumnElement[bool]:
    """Match the rows of a scorer of which one replica at least is in one of these states."""
    replica = aliased(Scorer)
    return exists().where(replica.scorer_id == of.scorer_id, replica.state.in_(states))


def last_used_at() -> ScalarSelect[datetime]:
    """When any replica of the row's scorer was last used."""
    replica = aliased(Scorer)
    return (
        select(func.max(replica.last_used_at))
        .where(replica.scorer_id == Scorer.scorer_id)
        .correlate(Scorer)
        .scalar_subquery()
    )
