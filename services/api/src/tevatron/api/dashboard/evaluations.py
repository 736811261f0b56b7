"""Evaluations: a table a benchmark, one of them, any two of them compared, and one query down to its passages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from fastapi import Query, Request
from sqlalchemy.orm import Session
from starlette.responses import Response

from tevatron.api.context import CurrentContext, CurrentSession, PageBounds, ResourceRef
from tevatron.api.dashboard.jobs import Cursor
from tevatron.api.dashboard.page import page_router, render
from tevatron.api.dashboard.passages import Shown, read_passages
from tevatron.api.evaluations.endpoints import compare_evaluations, list_evaluation_values
from tevatron.api.security import CurrentCaller
from tevatron.core.contracts.jobs import METRIC_PATTERN, Ref
from tevatron.core.contracts.resources import EvaluationResource, MetricComparison
from tevatron.core.errors import NotFoundError, unknown_name
from tevatron.core.store.evaluations import EvaluationRepository
from tevatron.core.store.models import Evaluation
from tevatron.core.store.registered import DatasetRepository
from tevatron.core.store.repository import KeyScope

router = page_router()

EVALUATIONS_LIMIT = 200
VALUES_LIMIT = 100
DIFFERENCES_LIMIT = 100
NAMES_LIMIT = 1000
LEVEL = 0.05
"""Below it a sign test's p is marked."""

MetricName = Annotated[str, Query(max_length=100, pattern=f"^$|{METRIC_PATTERN}")]
QueryId = Annotated[str, Query(min_length=1, max_length=1000, pattern=r"^[^\x00]*$")]


class Cell(NamedTuple):
    """One metric of one system."""

    value: float | None
    delta: float | None
    """To the first stage that it reranked."""
    is_best: bool


class Row(NamedTuple):
    """One system."""

    evaluation: Evaluation
    cells: list[Cell]


class Table(NamedTuple):
    """Systems over the same judgments."""

    title: str
    num_queries: int
    metrics: list[str]
    rows: list[Row]


class Compared(NamedTuple):
    """One metric of two evaluations, with a sign test over the queries that differ."""

    means: MetricComparison
    p: float
    is_marked: bool


@router.get("/evaluations")
def show_evaluations(
    request: Request, caller: CurrentCaller, session: CurrentSession, after: Cursor = ""
) -> Response:
    """Show the newest evaluations, a table for each benchmark or data set."""
    page = EvaluationRepository(session).list_evaluations(
        key_id=caller.scope, cursor=after or None, limit=EVALUATIONS_LIMIT
    )
    values = {
        "tables": _tables(page.items, _dataset_names(session, caller.scope)),
        "next": page.next_cursor,
        "after": after,
    }
    return render(request, "evaluations.html", values)


@router.get("/evaluations/{ref}")
def show_evaluation(
    request: Request,
    ref: ResourceRef,
    caller: CurrentCaller,
    session: CurrentSession,
    metric: MetricName = "",
    after: Cursor = "",
) -> Response:
    """Show one evaluation: its means, where they come from, and each query's value of one metric."""
    evaluation = EvaluationRepository(session).get(ref, key_id=caller.scope)
    metric = _chosen(metric, sorted(evaluation.metrics))
    bounds = PageBounds(limit=VALUES_LIMIT, after=after or None)
    names = _dataset_names(session, caller.scope)
    values = {
        "evaluation": evaluation,
        "dataset": names.get(evaluation.dataset_id, evaluation.dataset_id),
        "first_means": _first_means(evaluation),
        "metric": metric,
        "values": list_evaluation_values(evaluation.id, caller, session, bounds, metric),
        "after": after,
    }
    return render(request, "evaluation.html", values)


@router.get("/compare")
def show_comparison(
    request: Request,
    caller: CurrentCaller,
    session: CurrentSession,
    evaluation: Ref,
    baseline: Ref,
    metric: MetricName = "",
) -> Response:
    """Show two evaluations side by side, and the queries that differ most by one metric."""
    found = compare_evaluations(evaluation, caller, session, baseline)
    metric = _chosen(metric, [one.metric for one in found.metrics])
    values = {
        "evaluation": found.evaluation,
        "baseline": found.baseline,
        "compared": [_compared(one) for one in found.metrics],
        "metric": metric,
        "differences": EvaluationRepository(session).differences(
            found.evaluation.id, found.baseline.id, metric=metric, limit=DIFFERENCES_LIMIT
        ),
        "limit": DIFFERENCES_LIMIT,
        "level": LEVEL,
    }
    return render(request, "compare.html", values)


@router.get("/query")
def show_query(
    request: Request,
    caller: CurrentCaller,
    context: CurrentContext,
    evaluation: Ref,
    query: QueryId,
    baseline: Ref | None = None,
) -> Response:
    """Show one query of one evaluation, or of two: values, and the passages with their scores."""
    with context.sessions.begin() as session:
        repository = EvaluationRepository(session)
        found = [
            repository.get(ref, key_id=caller.scope)
            for ref in (evaluation, baseline)
            if ref is not None
        ]
        by_metric = [repository.values_of_query(one.id, query) for one in found]
        dataset = DatasetRepository(session).by_id(found[0].dataset_id)
    if not any(by_metric):
        raise NotFoundError(f"evaluation '{evaluation}' has no query '{query}'")
    # No session is open while files are read.
    shown = [Shown.of(one) for one in found]
    values = {
        "query": query,
        "evaluations": [EvaluationResource.model_validate(one) for one in found],
        "by_metric": by_metric,
        "metrics": sorted({name for values in by_metric for name in values}),
        "read": read_passages(context.settings.data, dataset, found[0].split, shown, query),
    }
    return render(request, "query.html", values)


def _chosen(metric: str, known: Sequence[str]) -> str:
    """Return the metric that is asked for, or the one that people look at first."""
    if not known:
        raise NotFoundError("these evaluations have no metric in common")
    if not metric:
        return next((name for name in known if name.startswith("ndcg@")), known[0])
    if metric not in known:
        raise NotFoundError(unknown_name("metric", metric, known))
    return metric


def _dataset_names(session: Session, scope: KeyScope) -> dict[str, str]:
    page = DatasetRepository(session).list_page(key_id=scope, limit=NAMES_LIMIT)
    return {row.id: row.name for row in page.items}


def _tables(evaluations: Sequence[Evaluation], names: Mapping[str, str]) -> list[Table]:
    """Group by what was judged: values over other judgments cannot be compared."""
    groups: dict[tuple[str, str], list[Evaluation]] = {}
    for one in evaluations:
        groups.setdefault((one.qrels_sha256, _title(one, names)), []).append(one)
    return [_table(title, group) for (_, title), group in groups.items()]


def _title(evaluation: Evaluation, names: Mapping[str, str]) -> str:
    if evaluation.benchmark is not None:
        return f"{evaluation.benchmark['name']}: {evaluation.benchmark['dataset']}"
    return f"{names.get(evaluation.dataset_id, evaluation.dataset_id)} ({evaluation.split})"


def _table(title: str, evaluations: list[Evaluation]) -> Table:
    metrics = sorted({name for one in evaluations for name in one.metrics})
    best = {
        name: max(one.metrics[name] for one in evaluations if name in one.metrics)
        for name in metrics
    }
    rows = []
    for one in evaluations:
        first = _first_means(one)
        cells = []
        for name in metrics:
            value = one.metrics.get(name)
            before = first.get(name)
            is_best = len(evaluations) > 1 and value == best[name]
            delta = None if value is None or before is None else value - before
            cells.append(Cell(value, delta, is_best))
        rows.append(Row(one, cells))
    return Table(title, evaluations[0].num_queries, metrics, rows)


def _first_means(evaluation: Evaluation) -> dict[str, float]:
    """Return the means of the list that was reranked; nothing where none was."""
    means = evaluation.first_stage.get("metrics")
    if evaluation.rerank is None or not isinstance(means, dict):
        return {}
    return {name: float(value) for name, value in means.items() if isinstance(value, int | float)}


def _compared(means: MetricComparison) -> Compared:
    p = sign_test(means.num_won, means.num_lost)
    return Compared(means, p, p < LEVEL)


def sign_test(won: int, lost: int) -> float:
    """Return the two-sided p of a sign test: how often a fair coin would fall at least as unevenly."""
    total = won + lost
    if total == 0:
        return 1.0
    # By logarithms: the binomials of thousands of queries are beyond a float.
    half = total * math.log(2)
    tail = sum(
        math.exp(math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1) - half)
        for k in range(min(won, lost) + 1)
    )
    return min(1.0, 2 * tail)
