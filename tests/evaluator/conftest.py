"""A scorer to talk to, and published data beside the repository: tests that read it skip by name where it is absent."""

import contextlib
import json
import os
import socket
import threading
from collections import deque
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = os.environ.get("TEVATRON_SHARED_DATA") or str(
        Path(__file__).parents[3] / "shared" / "data"
    )
    if not Path(folder, "scifact").is_dir():
        pytest.skip(f"no published data at {folder}: set TEVATRON_SHARED_DATA")
    return Path(folder)


INFO = {
    "backend": "hf",
    "model_name_or_path": "fake",
    "prompt_template": "tevatron",
    "head": "yes_no",
    "yes_id": 1,
    "no_id": 2,
    "max_length": 512,
    "dtype": "float32",
    "contract_sha256": "c" * 64,
    "max_probe_difference": 0.0,
    "versions": {},
}


@dataclass
class Request:
    """One `POST /score` as it came in."""

    candidates: list[dict]
    authorization: str | None


def overlap(candidate: dict) -> float:
    """Score a pair by the query's words that the passage has: deterministic, with ties."""
    words = f"{candidate.get('title', '')} {candidate.get('text', '')}".lower().split()
    return (
        sum(1.0 for word in set(candidate["query"].lower().split()) if word in words)
        - len(words) / 1000
    )


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *arguments):
        self.connections = []
        super().__init__(*arguments)

    def process_request(self, request, client_address):
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, request, client_address):
        pass  # a client that went away


def handler_of(scorer):
    """Return the class that answers requests as this fake scorer says."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if scorer.token and self.headers["Authorization"] != f"Bearer {scorer.token}":
                return self._send(401, {}, {"detail": "unknown token"})
            if self.path != "/info" or scorer.info is None:
                return self._send(404, {}, {"detail": "not found"})
            return self._send(200, {}, scorer.info)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if scorer.token and self.headers["Authorization"] != f"Bearer {scorer.token}":
                return self._send(401, {}, {"detail": "unknown token"})
            request = json.loads(body)
            scorer.on_body(request)
            candidates = request["candidates"]
            scorer.requests.append(Request(candidates, self.headers["Authorization"]))
            answer = scorer.answers.popleft() if scorer.answers else None
            if answer is None or callable(answer):
                scorer.before_answer(candidates)
                return self._send(
                    200, {}, answer(candidates) if answer else scorer.scores(candidates)
                )
            return self._send(*answer)

        def _send(self, status, headers, body):
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            with contextlib.suppress(OSError):
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *args):
            pass

    return Handler


class FakeScorer:
    """A real HTTP server that scores by word overlap, or misbehaves as a test asks."""

    def __init__(self, token=None, port=0):
        self.token = token
        self.info = dict(INFO)
        """What `GET /info` says; None where there is no such route."""
        self.requests: list[Request] = []
        self.answers = deque()
        """What the next requests get in place of scores: (status, headers, body), or a function of the candidates."""
        self.before_answer = lambda candidates: None
        self.on_body = lambda body: None
        self._stopped = self._killed = False
        self._server = _Server(("127.0.0.1", port), handler_of(self))
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        self._thread.start()

    @staticmethod
    def scores(candidates):
        return {
            "scores": [
                {
                    "query_id": c["query_id"],
                    "docid": c["docid"],
                    "score": overlap(c),
                    "missing": False,
                }
                for c in candidates
            ]
        }

    @property
    def num_pairs(self):
        return sum(len(request.candidates) for request in self.requests)

    def worsen(self):
        """Rank the other way round."""
        self.scores = lambda candidates: {
            "scores": [
                score | {"score": -score["score"]}
                for score in FakeScorer.scores(candidates)["scores"]
            ]
        }

    def kill(self):
        """Go away at once: requests in flight break."""
        self._killed = True
        self.stop()
        for connection in self._server.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def stop(self):
        if self._stopped:
            return
        self._stopped = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def start_scorer():
    """Start fake scorers that end with the test."""
    started = []

    def start(**options):
        started.append(FakeScorer(**options))
        return started[-1]

    yield start
    for scorer in started:
        scorer.stop()


@pytest.fixture
def jobs(settings, sessions):
    # Here, so that tests of files and HTTP alone do not import the store and Celery.
    from tests.support.eval_jobs import Jobs

    return Jobs(settings, sessions)


@pytest.fixture
def make_host(sessions, start_scorer):
    from tests.support.eval_jobs import Host

    hosts = []

    def make():
        hosts.append(Host(sessions, start_scorer))
        return hosts[-1]

    yield make
    for host in hosts:
        host._over.set()
        if host._thread.is_alive():
            host._thread.join()


@pytest.fixture
def host(make_host):
    return make_host().start()
