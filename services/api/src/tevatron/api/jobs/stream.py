"""A job's events as server-sent events: `id: seq`, one event each, until the one that ends the job for good.

Holds no database session between polls; knows the wire form only, a function brings the events.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable

import anyio
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from tevatron.core.contracts.jobs import JobEvent

KEEPALIVE_S = 15.0
"""Proxies close a connection that is silent for longer, usually after 30 or 60 s."""
POLL_S = 0.5

FetchEvents = Callable[[int], list[JobEvent]]
"""Events after a seq, oldest first; opens and closes its own session."""

_event_json = TypeAdapter(JobEvent)


class EventStream(StreamingResponse):
    """The response; buffering proxies are told to pass each event on."""

    def __init__(self, fetch: FetchEvents, *, after: int, is_closing: Callable[[], bool]) -> None:
        super().__init__(
            sse_lines(fetch, after=after, is_closing=is_closing),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )


async def sse_lines(
    fetch: FetchEvents, *, after: int, is_closing: Callable[[], bool]
) -> AsyncIterator[bytes]:
    """Yield events as they are stored, and a comment where there is nothing to say for a while."""
    sent_at = time.monotonic()
    is_over = False
    while not is_closing():
        events = await run_in_threadpool(fetch, after)
        for event in events:
            yield _encode(event)
            after, is_over = event.seq, event.ends_job
        if events:
            sent_at = time.monotonic()
            continue
        if is_over:
            # Looked for once more: a job that was resumed has events after its end.
            return
        if time.monotonic() - sent_at >= KEEPALIVE_S:
            yield KEEPALIVE_COMMENT
            sent_at = time.monotonic()
        await anyio.sleep(POLL_S)


def _encode(event: JobEvent) -> bytes:
    return format_sse_event(
        data_str=_event_json.dump_json(event).decode(), event=event.type.value, id=str(event.seq)
    )
