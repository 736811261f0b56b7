"""The dashboard's pages of a scorer with replicas."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.support.pages import Visitor
from tests.support.resources import make_resources

from tevatron.core.store.scorers import (
    ScorerTarget,
    claim_next_scorer,
    request_scorer,
    scorer_failed,
    scorer_ready,
)


class Load(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"tevatron_scorer_pairs_total 21.0\n")

    def log_message(self, *args):
        pass


@pytest.fixture
def replica_url():
    """Where a scorer tells that it has scored 21 pairs."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Load) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_pages_name_each_replica_and_add_up_their_load(server_url, sessions, replica_url):
    with sessions.begin() as session:
        checkpoint = make_resources(session, key_id=None)["checkpoint"]
        target = ScorerTarget(checkpoint_id=checkpoint)
        scorer_id = request_scorer(session, target, key_id=None, replicas=3)
        for place in range(3):
            claim = claim_next_scorer(session, host=f"host-of-{place}", lease_s=60.0)
            if place == 2:
                scorer_failed(session, claim, "out of memory")
            else:
                scorer_ready(session, claim, url=replica_url, token="t", info={})
    visitor = Visitor(server_url)
    try:
        page = visitor.get(f"/ui/scorers/{scorer_id}").text
        listed = visitor.get("/ui/scorers").text
        serving = visitor.get(f"/ui/checkpoints/{checkpoint}").text
    finally:
        visitor.client.close()
    assert all(f"<td>host-of-{place}</td>" in page for place in range(3))
    assert "out of memory" in page
    assert "<dt>pairs scored</dt><dd>42</dd>" in page
    for text in (page, listed, serving):
        assert "2 of 3 ready" in text
        assert f"{scorer_id}-2" not in text
