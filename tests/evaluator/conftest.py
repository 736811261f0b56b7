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
from typing import ClassVar

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    folder = os.environ.get("TEVATRON_SHARED_DATA") or str(
        Path(__file__).parents[3] / "shared" / "data"
    )
    if not Path(folder, "scifact").is_dir():
        pytest.skip(f"no published data at {folder}: set TEVATRON_SHARED_DATA")
    return Path(folder)


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


class FakeScorer:
    """A real HTTP server that scores by word overlap, or misbehaves as a test asks."""

    def __init__(self, token=None, port=0):
        self.token = token
        self.requests: list[Request] = []
        self.answers = deque()
        """What the next requests get in place of scores: (status, headers, body), or a function of the candidates."""
        self.before_answer = lambda candidates: None
        scorer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if scorer.token and self.headers["Authorization"] != f"Bearer {scorer.token}":
                    return self._send(401, {}, {"detail": "unknown token"})
                candidates = json.loads(body)["candidates"]
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

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            connections: ClassVar[list] = []

            def process_request(self, request, client_address):
                self.connections.append(request)
                super().process_request(request, client_address)

            def handle_error(self, request, client_address):
                pass  # a client that went away

        self._stopped = self._killed = False
        self._server = Server(("127.0.0.1", port), Handler)
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
