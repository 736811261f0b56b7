"""Evaluations: the means of one run's metrics, and each query's values."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import ClassVar, NamedTuple

from sqlalchemy import func, insert, select, tuple_
from sqlalchemy.orm import aliased

from tevatron.core.store.models import Evaluation, EvaluationValue
from tevatron.core.store.paging import Page, page_of
from tevatron.core.store.repository import KeyScope, Repository

_BATCH = 5000
EQUAL = 1e-9
"""Values this close are the same: the same ranking gives the same value but for the last bits."""


class Value(NamedTuple):
    """One metric of one query."""

    metric: str
    query_id: str
    value: float


class Outcome(NamedTuple):
    """How many queries one evaluation wins over another by one metric."""

    won: int
    lost: int
    same: int


class Difference(NamedTuple):
    """One query's value in two evaluations."""

    query_id: str
    value: float
    baseline: float


class EvaluationRepository(Repository[Evaluation]):
    """Evaluations."""

    table = Evaluation
    noun: ClassVar[str] = "evaluation"

    def add(self, evaluation: Evaluation, values: Iterable[Value]) -> None:
        """Store the means and the values of all queries."""
        self._session.add(evaluation)
        self._session.flush()
        rest = iter(values)
        while some := list(islice(rest, _BATCH)):
            self._session.execute(
                insert(EvaluationValue),
                [{"evaluation_id": evaluation.id, **value._asdict()} for value in some],
            )

    def of_job(self, job_id: str) -> Evaluation | None:
        """Return what this job has stored."""
        return self._session.scalars(select(Evaluation).where(Evaluation.job_id == job_id)).first()

    def list_evaluations(
        self,
        *,
        key_id: KeyScope,
        cursor: str | None = None,
        limit: int = 50,
        job_id: str | None = None,
        dataset_id: str | None = None,
        checkpoint_id: str | None = None,
        name: str | None = None,
    ) -> Page[Evaluation]:
        """Return the key's evaluations that match, newest first."""
        statement = self._visible(key_id)
        wanted = (
            (Evaluation.job_id, job_id),
            (Evaluation.dataset_id, dataset_id),
            (Evaluation.checkpoint_id, checkpoint_id),
            (Evaluation.name, name),
        )
        for column, value in wanted:
            if value is not None:
                statement = statement.where(column == value)
        return page_of(self._session, statement, Evaluation, cursor=cursor, limit=limit)

    def values_after(
        self,
        evaluation_id: str,
        place: tuple[str, str] | None,
        *,
        limit: int,
        metric: str | None = None,
    ) -> list[Value]:
        """Return up to `limit` values in the order of metric and query id, after the pair `place` of both."""
        columns = (EvaluationValue.metric, EvaluationValue.query_id)
        statement = select(*columns, EvaluationValue.value).where(
            EvaluationValue.evaluation_id == evaluation_id
        )
        if metric is not None:
            statement = statement.where(EvaluationValue.metric == metric)
        if place is not None:
            statement = statement.where(tuple_(*columns) > tuple_(*place))
        return [
            Value(*row) for row in self._session.execute(statement.order_by(*columns).limit(limit))
        ]

    def outcomes(self, evaluation_id: str, baseline_id: str) -> dict[str, Outcome]:
        """Compare two evaluations query by query, for the metrics that both have."""
        ours, theirs = aliased(EvaluationValue), aliased(EvaluationValue)
        delta = ours.value - theirs.value
        counts = (
            func.count().filter(delta > EQUAL),
            func.count().filter(delta < -EQUAL),
            func.count().filter(func.abs(delta) <= EQUAL),
        )
        rows = self._session.execute(
            select(ours.metric, *counts)
            .join(theirs, (theirs.metric == ours.metric) & (theirs.query_id == ours.query_id))
            .where(ours.evaluation_id == evaluation_id, theirs.evaluation_id == baseline_id)
            .group_by(ours.metric)
        )
        return {metric: Outcome(*found) for metric, *found in rows}

    def differences(
        self, evaluation_id: str, baseline_id: str, *, metric: str, limit: int
    ) -> list[Difference]:
        """Return the queries whose values differ most, those that the evaluation loses among them."""
        ours, theirs = aliased(EvaluationValue), aliased(EvaluationValue)
        delta = func.abs(ours.value - theirs.value)
        rows = self._session.execute(
            select(ours.query_id, ours.value, theirs.value)
            .join(theirs, (theirs.metric == ours.metric) & (theirs.query_id == ours.query_id))
            .where(
                ours.evaluation_id == evaluation_id,
                theirs.evaluation_id == baseline_id,
                ours.metric == metric,
                delta > EQUAL,
            )
            .order_by(delta.desc(), ours.query_id)
            .limit(limit)
        )
        return [Difference(*row) for row in rows]

    def values_of_query(self, evaluation_id: str, query_id: str) -> dict[str, float]:
        """Return one query's values by metric."""
        rows = self._session.execute(
            select(EvaluationValue.metric, EvaluationValue.value).where(
                EvaluationValue.evaluation_id == evaluation_id,
                EvaluationValue.query_id == query_id,
            )
        )
        return dict(rows.all())

    def values(self, evaluation_id: str, *, metric: str | None = None) -> list[Value]:
        """Return the queries' values, in the order of metric and query id."""
        statement = select(
            EvaluationValue.metric, EvaluationValue.query_id, EvaluationValue.value
        ).where(EvaluationValue.evaluation_id == evaluation_id)
        if metric is not None:
            statement = statement.where(EvaluationValue.metric == metric)
        rows = self._session.execute(
            statement.order_by(EvaluationValue.metric, EvaluationValue.query_id)
        )
        return [Value(*row) for row in rows]
