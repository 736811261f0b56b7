"""Which queries one system wins over another, and by how much. Knows numbers and query ids."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tevatron.core.errors import InputError

EQUAL = 1e-9
"""Values this close are a tie: the same ranking gives the same value but for the last bits."""


class QueryDifference(NamedTuple):
    """One query's value before and after."""

    query_id: str
    before: float
    after: float

    @property
    def delta(self) -> float:
        """How much the value grew."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Differences:
    """All queries, greatest gain first; equal ones by query id."""

    queries: list[QueryDifference]

    @property
    def won(self) -> list[QueryDifference]:
        """Queries whose value grew, greatest gain first."""
        return [query for query in self.queries if query.delta > EQUAL]

    @property
    def lost(self) -> list[QueryDifference]:
        """Queries whose value fell, greatest loss first."""
        return [query for query in reversed(self.queries) if query.delta < -EQUAL]

    @property
    def num_tied(self) -> int:
        """Queries with the same value."""
        return len(self.queries) - len(self.won) - len(self.lost)

    def summary(self) -> str:
        """Say in one line how many were won and lost, and by how much in the mean of those."""
        return f"won {_told(self.won)}, lost {_told(self.lost)}, same {self.num_tied}"


def differences(before: Mapping[str, float], after: Mapping[str, float]) -> Differences:
    """Compare two systems query by query.

    Raises:
        InputError: They were not evaluated on the same queries.
    """
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise InputError(
            f"the two systems were not evaluated on the same queries: only one has {', '.join(map(repr, odd[:3]))}"
        )
    queries = [QueryDifference(qid, before[qid], after[qid]) for qid in before]
    return Differences(sorted(queries, key=lambda query: (-query.delta, query.query_id)))


def _told(queries: list[QueryDifference]) -> str:
    if not queries:
        return "0"
    mean = sum(query.delta for query in queries) / len(queries)
    return f"{len(queries)} ({mean:+.4f} on average)"
