from __future__ import annotations

import threading
import time

import httpx
import pytest
from httpx_sse import connect_sse
from tests.support.resources import make_resources

from tevatron.api.jobs import stream
from tevatron.api.jobs.history import wants_stream
from tevatron.core.contracts.jobs import FailReason, JobKind, Phase
from tevatron.core.store.claims import append_events, claim_next_job, fail
from tevatron.core.store.lifecycle import NewEvent
from tevatron.core.store.models import EventType

SSE = {"Accept": "text/event-stream"}


@pytest.fixture
def job_id(sessions) -> str:
    with sessions.begin() as session:
        return make_resources(session, key_id=None)["job"]


def run_to_the_end(sessions, job_id: str, *, pause_s: float = 0.0) -> None:
    """Claim, say something, fail: 6 events with the first one that the submission left."""
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
    assert claim is not None
    assert claim.job_id == job_id
    time.sleep(pause_s)
    with sessions.begin() as session:
        append_events(session, claim, [NewEvent(EventType.PHASE, {"phase": "training"})])
    time.sleep(pause_s)
    with sessions.begin() as session:
        append_events(
            session,
            claim,
            [NewEvent(EventType.LOG, {"level": "info", "message": "a\nb\r\n\N{SNOWMAN}"})],
        )
    with sessions.begin() as session:
        fail(session, claim, reason=FailReason.DATA_ERROR, phase=Phase.TRAINING, message="line 17")


def test_pages_of_events_by_seq(client: httpx.Client, sessions, job_id: str):
    run_to_the_end(sessions, job_id)
    path = f"/v1/jobs/{job_id}/events"
    first = client.get(path, params={"limit": 4}).json()
    assert [event["seq"] for event in first["data"]] == [1, 2, 3, 4]
    assert (first["has_more"], first["next"]) == (True, 4)
    last = client.get(path, params={"limit": 4, "after": first["next"]}).json()
    assert [event["type"] for event in last["data"]] == ["log", "state"]
    assert last["data"][-1]["data"] == {
        "state": "failed",
        "reason": "data_error",
        "phase": "training",
        "message": "line 17",
    }
    assert (last["has_more"], last["next"]) == (False, 6)
    assert client.get(path, params={"after": 6}).json() == {
        "data": [],
        "has_more": False,
        "next": 6,
    }


def test_a_stream_tells_all_and_ends_with_the_job(client: httpx.Client, sessions, job_id: str):
    worker = threading.Thread(
        target=run_to_the_end, args=(sessions, job_id), kwargs={"pause_s": 0.7}
    )
    worker.start()
    try:
        with connect_sse(client, "GET", f"/v1/jobs/{job_id}/events") as source:
            assert source.response.headers["content-type"].startswith("text/event-stream")
            assert source.response.headers["x-accel-buffering"] == "no"
            assert source.response.headers["cache-control"] == "no-cache"
            events = list(source.iter_sse())
    finally:
        worker.join()
    assert [event.id for event in events] == ["1", "2", "3", "4", "5", "6"]
    assert [event.event for event in events] == ["state", "state", "state", "phase", "log", "state"]
    assert events[4].json()["data"]["message"] == "a\nb\r\n\N{SNOWMAN}"
    assert events[5].json()["data"]["state"] == "failed"
    # The stream is the pages, event for event.
    assert [event.json() for event in events] == client.get(f"/v1/jobs/{job_id}/events").json()[
        "data"
    ]


def test_a_stream_goes_on_after_the_last_event_id(client: httpx.Client, sessions, job_id: str):
    run_to_the_end(sessions, job_id)
    headers = {"Last-Event-ID": "4"}
    path = f"/v1/jobs/{job_id}/events?after=1"  # the header wins
    with connect_sse(client, "GET", path, headers=headers) as source:
        assert [event.id for event in source.iter_sse()] == ["5", "6"]


def test_a_stream_of_a_resumed_job_goes_on_after_its_first_end(
    client: httpx.Client, sessions, job_id: str
):
    path = f"/v1/jobs/{job_id}"
    for action in ("cancel", "resume", "cancel"):
        assert client.post(f"{path}:{action}", json={}).status_code == 202
    with connect_sse(client, "GET", f"{path}/events") as source:
        told = [event.json()["data"]["state"] for event in source.iter_sse()]
    assert told == ["queued", "cancelled", "queued", "cancelled"]


def test_nothing_is_left_after_the_last_event(client: httpx.Client, sessions, job_id: str):
    run_to_the_end(sessions, job_id)
    path = f"/v1/jobs/{job_id}/events"
    # 204 tells an EventSource not to connect again.
    assert client.get(path, headers={**SSE, "Last-Event-ID": "6"}).status_code == 204


@pytest.mark.parametrize("given", ["x", "-1", "1.5", "9" * 30])
def test_a_malformed_last_event_id_is_refused(client: httpx.Client, job_id: str, given: str):
    answer = client.get(f"/v1/jobs/{job_id}/events", headers={**SSE, "Last-Event-ID": given})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["parameter"] == "last-event-id"


def test_an_unknown_job_is_a_problem_and_no_stream(client: httpx.Client):
    answer = client.get("/v1/jobs/none/events", headers=SSE)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_quiet_stream_is_kept_alive_and_holds_no_connection(
    client: httpx.Client, engine, job_id: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.3)
    with client.stream("GET", f"/v1/jobs/{job_id}/events", headers=SSE) as answer:
        lines = answer.iter_lines()
        seen = [next(lines) for _ in range(8)]
        checked_out = {engine.pool.checkedout() for _ in range(20) if time.sleep(0.05) is None}
    assert ": ping" in seen
    assert 0 in checked_out


def test_a_stopping_server_ends_its_streams(app, client: httpx.Client, job_id: str):
    with connect_sse(client, "GET", f"/v1/jobs/{job_id}/events") as source:
        events = source.iter_sse()
        assert next(events).id == "1"
        app.state.context.closing.set()
        assert list(events) == []


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("text/event-stream", True),
        ("text/event-stream; charset=utf-8", True),
        ("application/json, text/event-stream;q=0.9", True),
        ("TEXT/EVENT-STREAM", True),
        ("*/*", False),
        ("application/json", False),
        ("", False),
        ("text/event-streams", False),
    ],
)
def test_wants_stream(accept: str, expected: bool):
    assert wants_stream(accept) is expected
