"""The client against a real HTTP server that answers what a test tells it to."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tevatron.core.cli import client as module
from tevatron.core.cli.client import ApiError, Client, find_url
from tevatron.core.contracts.jobs import EvalJob, JobGroup
from tevatron.core.errors import ConfigError, UnavailableError
from tevatron.core.settings import Settings

JOB = {
    "id": "job_1",
    "kind": "eval",
    "name": None,
    "state": "queued",
    "phase": None,
    "reason": None,
    "message": None,
    "priority": 0,
    "attempt": 0,
    "spec": {"kind": "eval", "dataset": "d"},
    "depends_on": [],
    "result": None,
    "created_at": "2026-01-01T00:00:00Z",
    "started_at": None,
    "finished_at": None,
}


class Server(ThreadingHTTPServer):
    """Gives the prepared answers in turn, the last one for ever, and keeps what it was asked."""

    def __init__(self):
        self.answers: list[tuple[int, dict[str, str], object]] = []
        self.requests: list[tuple[str, str, dict[str, str], object]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def _answer(self):
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.requests.append((self.command, self.path, dict(self.headers), body))
        answers = self.server.answers
        status, headers, content = answers.pop(0) if len(answers) > 1 else answers[0]
        payload = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(payload)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815  http.server's names

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def client(server):
    with Client(f"http://127.0.0.1:{server.server_port}", api_key="tvt_x") as client:
        yield client


def test_submission_is_sent_again_under_the_same_idempotency_key(server, client):
    server.answers = [(503, {"Retry-After": "0"}, {}), (201, {}, {"jobs": [JOB]})]
    jobs = client.submit(EvalJob(dataset="d"))
    assert [job.id for job in jobs] == ["job_1"]
    first, second = server.requests
    assert first[2]["Idempotency-Key"] == second[2]["Idempotency-Key"]
    assert first[2]["Authorization"] == "Bearer tvt_x"


def test_submission_carries_kinds_and_references(server, client):
    server.answers = [(201, {}, {"jobs": [JOB]})]
    group = JobGroup.model_validate(
        {
            "jobs": {
                "fit": {"kind": "train", "model": "m", "dataset": "d"},
                "test": {"kind": "eval", "dataset": "d", "rerank": {"checkpoint": {"from": "fit"}}},
            }
        }
    )
    client.submit(group)
    body = server.requests[0][3]
    assert body["jobs"]["fit"]["kind"] == "train"
    assert body["jobs"]["test"]["rerank"]["checkpoint"] == {"from": "fit"}
    assert JobGroup.model_validate(body) == group


def test_registration_that_may_have_arrived_is_not_sent_again(server, client, monkeypatch):
    monkeypatch.setattr(module, "ATTEMPTS", 3)
    server.answers = [(200, {"Content-Length": "5"}, b"")]  # ends in the middle of the body
    with pytest.raises(UnavailableError, match="does not answer"):
        client._send("POST", "/v1/models", body={"name": "m"})
    assert len(server.requests) == 1


def test_problem_document_becomes_a_readable_error(server, client):
    problem = {
        "title": "Unprocessable Content",
        "status": 422,
        "code": "invalid_input",
        "detail": "/name: too short",
        "errors": [
            {"message": "too short", "pointer": "/name"},
            {"message": "unknown field", "pointer": "/x"},
        ],
    }
    server.answers = [(422, {}, problem)]
    with pytest.raises(ApiError) as caught:
        client.job("job_1")
    assert (caught.value.status_code, caught.value.code) == (422, "invalid_input")
    assert str(caught.value).splitlines() == [
        "Unprocessable Content (422): /name: too short",
        "  /x: unknown field",
    ]


def test_refusal_without_a_key_names_the_setting(server, client):
    server.answers = [(401, {}, {"title": "Unauthorized", "detail": "an API key is needed"})]
    with pytest.raises(ApiError) as caught:
        client.job("job_1")
    assert str(caught.value).splitlines() == [
        "Unauthorized (401): an API key is needed",
        "  TEVATRON_API_KEY holds the key; an operator makes one: tevatron keys create NAME",
    ]


def test_answer_that_is_no_json_is_shown(server, client):
    server.answers = [(404, {}, b"<html>nginx</html>")]
    with pytest.raises(ApiError, match="<html>nginx</html>"):
        client.job("job_1")


def test_pages_are_read_to_the_end(server, client):
    server.answers = [
        (200, {}, {"data": [JOB], "has_more": True, "next": "c1"}),
        (200, {}, {"data": [{**JOB, "id": "job_2"}], "has_more": False, "next": None}),
    ]
    assert [job.id for job in client.jobs()] == ["job_1", "job_2"]
    assert server.requests[1][1] == "/v1/jobs?limit=100&after=c1"


def test_limit_is_kept_over_pages(server, client):
    server.answers = [(200, {}, {"data": [JOB, JOB], "has_more": True, "next": "c1"})]
    assert len(client.jobs(limit=4)) == 4
    assert server.requests[1][1] == "/v1/jobs?limit=2&after=c1"


def _stream(*events):
    """Return the wire form of events: seq, type, data."""
    lines = []
    for seq, kind, data in events:
        event = {"seq": seq, "time": "2026-01-01T00:00:00Z", "attempt": 1, "type": kind}
        lines.append(f"event: {kind}\ndata: {json.dumps(event | {'data': data})}\nid: {seq}\n\n")
    return ": keep-alive\n\n" + "".join(lines)


def test_a_stream_that_breaks_off_is_taken_up_after_its_last_event(server, client, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.01)
    begun = _stream((1, "state", {"state": "running"}), (2, "phase", {"phase": "training"}))
    ended = _stream((3, "state", {"state": "succeeded"}))
    server.answers = [
        (200, {}, JOB),
        (200, {"Content-Length": "1000"}, begun.encode()),  # ends in the middle
        (503, {"Retry-After": "0"}, {}),
        (200, {}, JOB),
        (200, {}, ended.encode()),
    ]
    assert [event.seq for event in client.follow("job_1")] == [1, 2, 3]
    first, second = [request for request in server.requests if request[1].endswith("/events")]
    assert first[2]["Accept"] == second[2]["Accept"] == "text/event-stream"
    assert "Last-Event-ID" not in first[2]
    assert second[2]["Last-Event-ID"] == "2"


def test_following_ends_where_nothing_more_can_come(server, client, monkeypatch):
    monkeypatch.setattr(module, "POLL_S", 0.01)
    server.answers = [
        (200, {}, JOB),
        (200, {}, _stream((1, "state", {"state": "queued"})).encode()),
        (200, {}, JOB),
        (204, {}, b""),
    ]
    assert [event.seq for event in client.follow("job_1")] == [1]


def test_following_a_job_that_is_not_there_is_its_problem(server, client):
    server.answers = [(404, {}, {"title": "Not Found", "detail": "unknown job 'x'"})]
    with pytest.raises(ApiError, match="unknown job 'x'"):
        list(client.follow("x"))


def test_nobody_there_is_an_error_that_names_the_address(monkeypatch):
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Client(url) as client, pytest.raises(UnavailableError, match=url):
            client.job("job_1")


def test_address_comes_from_the_running_stack(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stack.json").write_text('{"url": "http://127.0.0.1:4321"}')
    assert find_url(Settings(home=tmp_path)) == "http://127.0.0.1:4321"
    assert find_url(Settings(home=tmp_path, url="http://x")) == "http://x"


def test_no_stack_and_no_url_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="TEVATRON_URL is not set and no `tevatron up` runs on"):
        find_url(Settings(home=tmp_path))
