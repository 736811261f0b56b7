"""The pool against the scorer's own server, over HTTP: what one promises is what the other expects."""

import asyncio
import contextlib
import socket
import threading
import time
from dataclasses import replace

import httpx
import pytest
import uvicorn
from tests.support.scorers import served

from tevatron.core.contracts.scores import Candidate
from tevatron.core.errors import InputError
from tevatron.core.prompts import Pair
from tevatron.evaluator.answers import NotFiniteScoreError, ScorerRefusedError, ScorersDifferError
from tevatron.evaluator.pool import Backend, PoolOptions, learn_served
from tevatron.evaluator.score_log import ScoreLog
from tevatron.evaluator.scoring import score_all
from tevatron.scorer.engines.base import EngineInfo
from tevatron.scorer.engines.fake import FakeEngine
from tevatron.scorer.server import ServerOptions, create_app

QUICK = PoolOptions(first_chunk=8, backoff_s=0.01, poll_s=0.02)


class _NanEngine:
    def score(self, token_ids):
        return [float("nan") for _ in token_ids]

    def info(self):
        return EngineInfo(dtype="float32", device="cpu")


class _Quiet(uvicorn.Server):
    """Runs in a thread, where no signal handler can be set."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def _is_ready(listener):
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/ready"
    return httpx.get(url, trust_env=False, verify=False).status_code == 200


@pytest.fixture
def serve():
    running = []

    def start(engine=None, *, contract=None, max_length=256, **options):
        what = served(engine or FakeEngine(), max_length=max_length)
        if contract is not None:
            what = replace(what, info=what.info.model_copy(update={"contract_sha256": contract}))
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            create_app(lambda: what, ServerOptions(**options)), log_config=None, access_log=False
        )
        server = _Quiet(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        running.append((server, thread))
        deadline = time.monotonic() + 20
        while not server.started or not _is_ready(listener):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return what, f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(20)


@pytest.fixture
def log(tmp_path):
    with ScoreLog(tmp_path / "scores.jsonl", identity="test") as log:
        yield log


def candidates(count, **changes):
    return [
        Candidate(
            **{
                "query_id": "q",
                "docid": f"d{i}",
                "query": "tea",
                "title": "A-B",
                "text": f"passage {i}",
            }
            | changes
        )
        for i in range(count)
    ]


def test_scores_are_those_of_the_engine(serve, log):
    what, url = serve(token="secret")
    found = score_all([Backend(url=url, token="secret")], candidates(50), log, options=QUICK)
    prompts = [
        what.renderer.render(Pair(query="tea", title="A-B", text=f"passage {i}")).ids
        for i in range(50)
    ]
    assert [found["q"][f"d{i}"] for i in range(50)] == FakeEngine().score(prompts)


def test_wrong_token_is_refused(serve, log):
    _, url = serve(token="secret")
    with pytest.raises(ScorerRefusedError, match="401 expected the header Authorization"):
        score_all([Backend(url=url, token="other")], candidates(1), log, options=QUICK)


def test_query_that_alone_is_too_long_is_named(serve, log):
    _, url = serve()
    with pytest.raises(InputError, match="query_id 'q'"):
        score_all([Backend(url=url)], candidates(1, query="tea " * 5000), log, options=QUICK)


def test_model_that_gives_no_number_is_told_apart(serve, log):
    _, url = serve(_NanEngine(), contract="c" * 64)
    with pytest.raises(NotFiniteScoreError, match="query_id 'q', docid 'd0' scores nan"):
        score_all([Backend(url=url)], candidates(1), log, options=QUICK)


def test_body_limit_makes_requests_smaller(serve, log):
    _, url = serve(contract="c" * 64, max_body_bytes=600)
    found = score_all([Backend(url=url)], candidates(30), log, options=QUICK)
    assert len(found["q"]) == 30


def test_full_queue_is_waited_for(serve, log):
    _, url = serve(FakeEngine(seconds_per_token=0.0002), max_queue_tokens=100, max_requests=2)
    options = PoolOptions(first_chunk=4, max_chunk=4, slots=6, backoff_s=0.01, poll_s=0.02, tries=2)
    found = score_all([Backend(url=url)], candidates(60), log, options=options)
    assert len(found["q"]) == 60


def test_probes_that_are_too_large_are_a_clear_refusal(serve, log):
    _, url = serve(max_body_bytes=600)
    with pytest.raises(ScorerRefusedError, match="finds 5 probes too large"):
        score_all([Backend(url=url)], candidates(1), log, options=QUICK)


def test_models_that_differ_in_truncation_alone_are_told_apart(serve):
    urls = [serve(max_length=length)[1] for length in (256, 200)]
    with pytest.raises(ScorersDifferError, match="max_length is"):
        learn_served([Backend(url=url) for url in urls], options=QUICK)


def test_model_that_gives_no_number_for_a_probe_is_told_apart_too(serve):
    _, url = serve(_NanEngine())
    with pytest.raises(
        NotFiniteScoreError, match="query_id 'tevatron-probe', docid '0' scores nan"
    ):
        learn_served([Backend(url=url)], options=QUICK)
