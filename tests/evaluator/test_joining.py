"""Backends that come while the work is going on: replicas become ready one by one, and come back elsewhere."""

import threading
import time

import pytest

from tevatron.core.contracts.scores import Candidate
from tevatron.evaluator.answers import ScorersDifferError
from tevatron.evaluator.pool import Backend, PoolOptions, stream_scores

QUICK = PoolOptions(
    first_chunk=2, max_chunk=2, slots=1, tries=1, backoff_s=0.01, poll_s=0.02, look_s=0.02
)
PAIRS = [
    (place, Candidate(query_id="q", docid=f"d{place}", query="a b c", text="a b " * place))
    for place in range(60)
]


def backend_of(scorer):
    return Backend(url=scorer.url, token=scorer.token)


def score(look):
    """Return the scores by key, of which each must come once."""
    found = {}

    def sink(keys, scores):
        assert not found.keys() & set(keys)
        found.update(zip(keys, scores, strict=True))

    stream_scores(look, PAIRS, sink, options=QUICK)
    return found


@pytest.fixture
def slow_scorer(start_scorer):
    def start(**options):
        scorer = start_scorer(**options)
        scorer.before_answer = lambda candidates: time.sleep(0.03)
        return scorer

    return start


def test_a_backend_that_comes_later_gets_work(slow_scorer):
    alone = score([backend_of(slow_scorer())])
    first, second = slow_scorer(token="a"), slow_scorer(token="b")

    def look():
        started = bool(first.requests)
        return [backend_of(scorer) for scorer in ((first, second) if started else (first,))]

    assert score(look) == alone
    assert first.num_pairs + second.num_pairs == len(PAIRS)
    assert second.num_pairs > 10


def test_the_last_one_dies_and_its_successor_finishes(slow_scorer):
    alone = score([backend_of(slow_scorer())])
    first, second, third = slow_scorer(), slow_scorer(), slow_scorer()
    at = [first, second]

    def die(_):
        if first.num_pairs > 10 and second not in dead:
            dead.append(second)
            at[1] = third
            threading.Thread(target=second.kill).start()

    dead = []
    first.before_answer = die
    assert score(lambda: [backend_of(scorer) for scorer in at]) == alone
    assert third.num_pairs > 0


def test_one_that_serves_something_else_does_not_join_in_silence(slow_scorer):
    first, other = slow_scorer(), slow_scorer()
    other.info["contract_sha256"] = "d" * 64
    with pytest.raises(ScorersDifferError, match=r"contract_sha256 is .* at http"):
        score(lambda: [backend_of(first), *([backend_of(other)] if first.requests else [])])
    assert other.num_pairs == 0


def test_what_looking_raises_ends_the_work(slow_scorer):
    scorer = slow_scorer()

    def look():
        if scorer.requests:
            raise RuntimeError("stopped")
        return [backend_of(scorer)]

    with pytest.raises(RuntimeError, match="stopped"):
        score(look)
    assert scorer.num_pairs < len(PAIRS)
