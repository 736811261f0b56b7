"""Two replicas of the real engine on the real host: kill -9 of one in the middle of a rerank changes no score."""

import os
import signal

import pytest
from tests.scorer.host.test_host import START_S, _children, _host, _want
from tests.support.processes import wait_for
from tests.support.tiny_model import tiny_folder

from tevatron.core.contracts.scores import Candidate
from tevatron.core.store.models import ScorerState
from tevatron.core.store.scorers import ScorerRepository, release_scorer
from tevatron.evaluator.pool import Backend, PoolOptions, stream_scores

pytestmark = pytest.mark.db

OPTIONS = PoolOptions(max_chunk=20, look_s=0.2, poll_s=0.05)
PAIRS = [
    (
        place,
        Candidate(
            query_id=f"q{place % 7}",
            docid=f"d{place}",
            query=f"which river is number {place % 7}",
            text=f"stone {place} lamp " * (1 + place % 5),
        ),
    )
    for place in range(600)
]


def _replicas(sessions, scorer_id):
    with sessions.begin() as session:
        [found] = ScorerRepository(session).replicas([scorer_id])
        return found


def _ready(sessions, scorer_id):
    return [
        Backend(url=row.url, token=row.token)
        for row in _replicas(sessions, scorer_id).rows
        if row.state is ScorerState.READY
    ]


def _score(backends, on_scores=lambda found: None):
    found = {}

    def sink(keys, scores):
        assert not found.keys() & set(keys)
        found.update(zip(keys, scores, strict=True))
        on_scores(found)

    stream_scores(backends, PAIRS, sink, options=OPTIONS)
    return found


@pytest.mark.timeout(600)
def test_one_of_two_replicas_is_killed_while_both_score(settings, sessions, tmp_path):
    settings = settings.model_copy(update={"lease_s": 120.0})
    scorer_id = _want(sessions, tiny_folder(tmp_path / "model"), replicas=2)
    with _host(settings, tmp_path / "log", real=True) as host:
        wait_for(
            lambda: len(_ready(sessions, scorer_id)) == 2, timeout_s=START_S, what="two replicas"
        )
        first, second = _ready(sessions, scorer_id)
        alone = _score([first])
        killed = []

        def kill_one(found):
            if len(found) >= 100 and not killed:
                killed.append(_children(host.pid)[-1])
                os.kill(killed[0], signal.SIGKILL)

        scores = _score(lambda: _ready(sessions, scorer_id), kill_one)
        assert len(scores) == len(PAIRS)
        assert scores == pytest.approx(alone, abs=1e-5)

        # Its host starts it again under another address, where it scores the same.
        wait_for(
            lambda: len(_ready(sessions, scorer_id)) == 2, timeout_s=START_S, what="the restart"
        )
        [again] = set(_ready(sessions, scorer_id)) - {first, second}
        assert _score([again]) == pytest.approx(alone, abs=1e-5)
        with sessions.begin() as session:
            release_scorer(session, scorer_id)
        wait_for(lambda: not _children(host.pid), timeout_s=60, what="the end of both")
