"""The pool over real scorer processes, with the hf engine on a tiny model: killed with -9 while 2,000 pairs are reranked."""

import os
import re
import signal
import socket
import threading
import urllib.request
from contextlib import ExitStack

import pytest
from tests.support.processes import python, running, wait_for
from tests.support.tiny_model import tiny_folder

from tevatron.core.contracts.scores import Candidate
from tevatron.core.errors import UnavailableError
from tevatron.evaluator.pool import Backend, PoolOptions, learn_served
from tevatron.evaluator.score_log import ScoreLog
from tevatron.evaluator.scoring import score_all

NUM_QUERIES, NUM_PASSAGES = 20, 100
NUM_PAIRS = NUM_QUERIES * NUM_PASSAGES
NUM_PROBES = 2 * 5
"""What a scorer without a contract is sent before its first chunk: when it is learned what all serve, and by the pool."""
OPTIONS = PoolOptions(max_chunk=50, tries=2, backoff_s=0.05, poll_s=0.05)


def candidates():
    return [
        Candidate(query_id=f"q{q}", docid=f"d{d}", query=f"q {q}", text=f"{d} of {q}")
        for q in range(NUM_QUERIES)
        for d in range(NUM_PASSAGES)
    ]


class Scorer:
    """One server process."""

    def __init__(self, stack, folder):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.process = stack.enter_context(
            running(
                python(
                    *(
                        "-m",
                        "tevatron.eval.serve.server",
                        "--backend",
                        "hf",
                        "--model",
                        str(folder),
                    ),
                    *("--prompt_template", "tevatron", "--dtype", "float32", "--device", "cpu"),
                    *("--rerank_max_len", "160", "--host", "127.0.0.1", "--port", str(port)),
                ),
                environment={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )

    @property
    def backend(self):
        return Backend(url=self.url)

    def is_ready(self):
        try:
            return urllib.request.urlopen(f"{self.url}/ready", timeout=5).status == 200
        except OSError:
            return False

    def num_pairs(self):
        """Return how many pairs the server itself says it has scored."""
        text = urllib.request.urlopen(f"{self.url}/metrics", timeout=5).read().decode()
        return int(re.search(r"^tevatron_scorer_pairs_total (\d+)(?:\.0)?$", text, re.MULTILINE)[1])

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"), seed=3)


@pytest.fixture
def start(folder):
    with ExitStack() as stack:

        def start(count):
            scorers = [Scorer(stack, folder) for _ in range(count)]
            for scorer in scorers:
                wait_for(scorer.is_ready, timeout_s=240, what=f"{scorer.url}/ready")
            return scorers

        yield start


def flat(scores):
    return {(q, d): score for q, by_docid in scores.items() for d, score in by_docid.items()}


def rerank(scorers, path, *, after=None, then=lambda: None):
    """Score all pairs with a log at `path`; `then` is called once `after` of them are done."""
    backends = [scorer.backend for scorer in scorers]
    called = threading.Event()

    def on_progress(done):
        if after is not None and done >= after and not called.is_set():
            called.set()
            then()

    with ScoreLog(path, identity="test") as log:
        served = learn_served(backends, options=OPTIONS)
        log.served_by(served.identity)
        return score_all(
            backends, candidates(), log, served=served, options=OPTIONS, on_progress=on_progress
        )


@pytest.mark.timeout(600)
def test_rerank_survives_the_death_of_one_backend_and_resumes_after_that_of_both(start, tmp_path):
    first, second = start(2)
    found = flat(rerank([first, second], tmp_path / "one", after=NUM_PAIRS // 3, then=first.kill))
    assert len(found) == NUM_PAIRS
    # Whatever the dead one did not answer, the other one did.
    assert NUM_PAIRS // 3 < second.num_pairs() - NUM_PROBES < NUM_PAIRS

    (third,) = start(1)

    def kill_both():
        second.kill()
        third.kill()

    path = tmp_path / "both"
    with pytest.raises(UnavailableError, match=rf"no scorer answers: {second.url}.*{third.url}"):
        rerank([second, third], path, after=NUM_PAIRS // 2, then=kill_both)
    with ScoreLog(path, identity="test") as log:
        kept = len(log)
    assert NUM_PAIRS // 2 <= kept < NUM_PAIRS

    fourth, fifth = start(2)
    resumed = flat(rerank([fourth, fifth], path))
    assert fourth.num_pairs() + fifth.num_pairs() - 2 * NUM_PROBES == NUM_PAIRS - kept
    # The same scores as those of another order of requests, on other processes.
    assert resumed.keys() == found.keys()
    assert max(abs(resumed[pair] - found[pair]) for pair in found) < 1e-5
    # A third time, nothing at all is asked.
    again = flat(rerank([fourth, fifth], path))
    assert again == resumed
    assert (
        fourth.num_pairs() + fifth.num_pairs() - 2 * NUM_PROBES <= NUM_PAIRS - kept + 2 * NUM_PROBES
    )
