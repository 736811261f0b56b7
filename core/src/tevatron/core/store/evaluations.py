"""Evaluations: the means of one run's metrics, and each query's values."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import ClassVar, NamedTuple

from sqlalchemy import insert, select

from tevatron.core.store.models import Evaluation, EvaluationValue
from tevatron.core.store.repository import Repository

_BATCH = 5000


class Value(NamedTuple):
    """One metric of one query."""

    metric: str
    query_id: str
    value: float


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
