"""GET /v1/evaluations, /v1/evaluations/{ref}, its comparison with another one, and each query's values."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Annotated

from fastapi import APIRouter, Query

from tevatron.api.body import CheckedRoute
from tevatron.api.context import CurrentPage, CurrentSession, ResourceRef
from tevatron.api.pages import page_resource
from tevatron.api.problems import responses
from tevatron.api.security import CurrentCaller
from tevatron.core.contracts.jobs import METRIC_PATTERN, Name, Ref
from tevatron.core.contracts.resources import (
    EvaluationComparison,
    EvaluationResource,
    EvaluationValue,
    MetricComparison,
    Page,
)
from tevatron.core.errors import InputError
from tevatron.core.store.evaluations import EvaluationRepository, Value

router = APIRouter(tags=["evaluations"], route_class=CheckedRoute)


@router.get("/v1/evaluations", operation_id="list_evaluations", responses=responses())
def list_evaluations(
    caller: CurrentCaller,
    session: CurrentSession,
    bounds: CurrentPage,
    job_id: Annotated[Ref | None, Query()] = None,
    dataset_id: Annotated[Ref | None, Query()] = None,
    checkpoint_id: Annotated[Ref | None, Query()] = None,
    name: Annotated[Name | None, Query()] = None,
) -> Page[EvaluationResource]:
    """List evaluations, newest first."""
    page = EvaluationRepository(session).list_evaluations(
        key_id=caller.scope,
        cursor=bounds.after,
        limit=bounds.limit,
        job_id=job_id,
        dataset_id=dataset_id,
        checkpoint_id=checkpoint_id,
        name=name,
    )
    return page_resource(page, EvaluationResource.model_validate)


@router.get("/v1/evaluations/{ref}", operation_id="get_evaluation", responses=responses(404))
def get_evaluation(
    ref: ResourceRef, caller: CurrentCaller, session: CurrentSession
) -> EvaluationResource:
    """Return an evaluation with its means."""
    row = EvaluationRepository(session).get(ref, key_id=caller.scope)
    return EvaluationResource.model_validate(row)


@router.get(
    "/v1/evaluations/{ref}/comparison",
    operation_id="compare_evaluations",
    responses=responses(404),
)
def compare_evaluations(
    ref: ResourceRef,
    caller: CurrentCaller,
    session: CurrentSession,
    baseline: Annotated[Ref, Query(description="Id or name of the evaluation to compare with.")],
) -> EvaluationComparison:
    """Compare two evaluations with the same judgments: the means, and the queries won and lost."""
    repository = EvaluationRepository(session)
    ours = repository.get(ref, key_id=caller.scope)
    theirs = repository.get(baseline, key_id=caller.scope)
    if ours.qrels_sha256 != theirs.qrels_sha256:
        raise InputError(
            f"evaluations '{ref}' and '{baseline}' cannot be compared: they were made with other judgments "
            f"({ours.dataset_id}, {ours.split}, {ours.num_queries} queries; {theirs.dataset_id}, {theirs.split}, "
            f"{theirs.num_queries} queries)"
        )
    return EvaluationComparison(
        evaluation=EvaluationResource.model_validate(ours),
        baseline=EvaluationResource.model_validate(theirs),
        metrics=[
            MetricComparison(
                metric=metric,
                value=ours.metrics[metric],
                baseline=theirs.metrics[metric],
                delta=ours.metrics[metric] - theirs.metrics[metric],
                num_won=outcome.won,
                num_lost=outcome.lost,
                num_same=outcome.same,
            )
            for metric, outcome in sorted(repository.outcomes(ours.id, theirs.id).items())
        ],
    )


@router.get(
    "/v1/evaluations/{ref}/values", operation_id="list_evaluation_values", responses=responses(404)
)
def list_evaluation_values(
    ref: ResourceRef,
    caller: CurrentCaller,
    session: CurrentSession,
    bounds: CurrentPage,
    metric: Annotated[
        str | None,
        Query(max_length=100, pattern=METRIC_PATTERN, description="e.g. ndcg@10"),
    ] = None,
) -> Page[EvaluationValue]:
    """List each query's values, in the order of metric and query id."""
    repository = EvaluationRepository(session)
    evaluation = repository.get(ref, key_id=caller.scope)
    place = None if bounds.after is None else _place(bounds.after)
    values = repository.values_after(evaluation.id, place, limit=bounds.limit + 1, metric=metric)
    page, has_more = values[: bounds.limit], len(values) > bounds.limit
    return Page[EvaluationValue](
        data=[EvaluationValue.model_validate(value) for value in page],
        has_more=has_more,
        next=_cursor(page[-1]) if has_more else None,
    )


def _cursor(value: Value) -> str:
    return base64.urlsafe_b64encode(json.dumps([value.metric, value.query_id]).encode()).decode()


def _place(cursor: str) -> tuple[str, str]:
    try:
        metric, query_id = json.loads(base64.urlsafe_b64decode(cursor.encode()))
    except (binascii.Error, ValueError, TypeError, RecursionError) as error:
        raise InputError(f"after: expected `next` of an earlier page, got {cursor!r}") from error
    if not (_is_text(metric) and _is_text(query_id)):
        raise InputError(f"after: expected `next` of an earlier page, got {cursor!r}")
    return metric, query_id


def _is_text(part: object) -> bool:
    if not isinstance(part, str) or "\0" in part:
        return False
    return part.isascii() or not any("\ud800" <= character <= "\udfff" for character in part)
