"""GET /v1/jobs/{ref}/events, as pages or as server-sent events, and GET /v1/jobs/{ref}/log."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Header, Query, Response
from pydantic import Field

from tevatron.api.body import CheckedRoute
from tevatron.api.context import CurrentContext, ResourceRef
from tevatron.api.jobs.log import read_tail
from tevatron.api.jobs.resources import job_event
from tevatron.api.jobs.stream import EventStream
from tevatron.api.problems import responses
from tevatron.api.security import CurrentCaller
from tevatron.core.contracts.jobs import FINAL_STATES, JobEvent
from tevatron.core.contracts.resources import JobEventPage
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.session import Sessions

router = APIRouter(tags=["jobs"], route_class=CheckedRoute)

STREAM_BATCH = 500
SSE_TYPE = "text/event-stream"
MAX_SEQ = 2**63 - 1

EVENTS_OK = {
    "description": "A page, or with `Accept: text/event-stream` the events as they come, until the job is over.",
    "content": {
        SSE_TYPE: {
            "schema": {
                "type": "string",
                "description": "Server-sent events: `id` is the seq, `event` the type, `data` a JobEvent.",
            }
        }
    },
}
LOG_OK = {
    "description": "The end of the log.",
    "content": {"text/plain": {"schema": {"type": "string"}}},
}


@router.get(
    "/v1/jobs/{ref}/events",
    operation_id="list_job_events",
    response_model=JobEventPage,
    responses={
        **responses(404),
        200: EVENTS_OK,
        204: {
            "description": "The job is over and Last-Event-ID was its last event: do not connect again."
        },
    },
)
def list_job_events(
    ref: ResourceRef,
    caller: CurrentCaller,
    context: CurrentContext,
    after: Annotated[
        int, Query(ge=0, le=MAX_SEQ, description="Only events with a higher seq.")
    ] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    accept: Annotated[str, Header(include_in_schema=False)] = "",
    last_event_id: Annotated[
        int | None,
        Field(ge=0, le=MAX_SEQ),
        Header(description="Of an event stream that broke off: wins over `after`."),
    ] = None,
) -> JobEventPage | Response:
    """Return what happened to a job, oldest first."""
    # The session ends before the stream starts: a stream may live for days.
    with context.sessions.begin() as session:
        job = JobRepository(session).get(ref, key_id=caller.scope)
    fetch = _fetcher(context.sessions, job.id)
    if not wants_stream(accept):
        events = fetch(after, limit + 1)
        page, has_more = events[:limit], len(events) > limit
        return JobEventPage(data=page, has_more=has_more, next=page[-1].seq if page else after)
    if last_event_id is not None:
        after = last_event_id
        if job.state in FINAL_STATES and job.last_seq <= after:
            return Response(status_code=204)
    return EventStream(
        lambda seq: fetch(seq, STREAM_BATCH), after=after, is_closing=context.closing.is_set
    )


@router.get(
    "/v1/jobs/{ref}/log",
    operation_id="get_job_log",
    response_class=Response,
    responses={**responses(404), 200: LOG_OK},
)
def get_job_log(
    ref: ResourceRef,
    caller: CurrentCaller,
    context: CurrentContext,
    attempt: Annotated[
        int | None, Query(ge=1, le=1_000_000, description="The newest attempt when unset.")
    ] = None,
    max_bytes: Annotated[int, Query(ge=1, le=2**20)] = 64 * 2**10,
) -> Response:
    """Return the end of what an attempt's processes wrote, as text."""
    with context.sessions.begin() as session:
        job = JobRepository(session).get(ref, key_id=caller.scope)
    tail = read_tail(
        context.settings.data, job_id=job.id, attempt=attempt or job.attempt, max_bytes=max_bytes
    )
    return Response(tail.decode("utf-8", "replace"), media_type="text/plain")


def wants_stream(accept: str) -> bool:
    """Say whether the client asks for server-sent events by name."""
    return any(re.fullmatch(rf"\s*{SSE_TYPE}\s*(;.*)?", part) for part in accept.lower().split(","))


def _fetcher(sessions: Sessions, job_id: str) -> Callable[[int, int], list[JobEvent]]:
    def fetch(after: int, limit: int) -> list[JobEvent]:
        with sessions.begin() as session:
            rows = JobRepository(session).events_page(job_id, after_seq=after, limit=limit)
            return [job_event(row) for row in rows]

    return fetch
