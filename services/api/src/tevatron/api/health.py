"""Probes and metrics: whether the process lives, whether its parts answer, what Prometheus scrapes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Annotated, Literal

import redis
from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError

from tevatron.api.context import Context, CurrentContext, CurrentSession
from tevatron.api.metrics import StoreCollector, exposition
from tevatron.api.problems import only, responses
from tevatron.core.contracts.resources import Resource
from tevatron.core.errors import TevatronError
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.scorers import ScorerRepository
from tevatron.core.store.session import check_schema

log = logging.getLogger(__name__)
router = APIRouter(tags=["operations"])
PING_TIMEOUT_S = 2.0
METRICS_OK = {
    "description": "Prometheus' text format.",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}


class Health(Resource):
    """The process lives."""

    status: Literal["ok"] = "ok"


class Readiness(Resource):
    """What each part that the API needs says."""

    status: Literal["ready", "not_ready"]
    database: Literal["ok", "failed"]
    broker: Literal["ok", "failed"]
    """A submission is taken without the broker; jobs start once it is back."""


@router.get("/healthz", operation_id="get_health", responses=only(500))
def get_health() -> Health:
    """Say that the process lives, and nothing of its parts."""
    return Health()


def check_readiness(context: CurrentContext) -> Readiness:
    """Look at the database, its schema, and the broker."""
    database = _answers("database", lambda: _check_database(context))
    broker = _answers("broker", lambda: _ping(context.settings.require_broker()))
    ready = database and broker
    return Readiness(
        status="ready" if ready else "not_ready",
        database="ok" if database else "failed",
        broker="ok" if broker else "failed",
    )


@router.get(
    "/readyz",
    operation_id="get_readiness",
    responses={**only(500), 503: {"model": Readiness, "description": "A part does not answer."}},
)
def get_readiness(
    found: Annotated[Readiness, Depends(check_readiness)], response: Response
) -> Readiness:
    """Say whether database, schema and broker are there."""
    response.status_code = 200 if found.status == "ready" else 503
    return found


@router.get(
    "/metrics",
    operation_id="get_metrics",
    response_class=Response,
    responses={**responses(), 200: METRICS_OK},
)
def get_metrics(context: CurrentContext, session: CurrentSession) -> Response:
    """Return the metrics of this process and of all jobs, in Prometheus' text format."""
    jobs, scorers = JobRepository(session), ScorerRepository(session)
    gauges = StoreCollector(
        jobs=jobs.count_by_state(),
        oldest_queued_s=jobs.oldest_queued_s(),
        scorers=scorers.count_by_state(),
    )
    return Response(exposition(context.metrics, gauges), media_type=CONTENT_TYPE_LATEST)


def _answers(part: str, check: Callable[[], None]) -> bool:
    try:
        check()
    except (SQLAlchemyError, TevatronError, redis.RedisError) as error:
        log.warning("%s is not ready: %s", part, error)
        return False
    return True


def _check_database(context: Context) -> None:
    engine = context.sessions.kw["bind"]
    check_schema(engine)


def _ping(url: str) -> None:
    with redis.Redis.from_url(
        url, socket_timeout=PING_TIMEOUT_S, socket_connect_timeout=PING_TIMEOUT_S
    ) as client:
        client.ping()
