"""The pool against real HTTP servers, well-behaved and not."""

import json
import threading
import time

import pytest

from tevatron.core.contracts.scores import Candidate
from tevatron.core.errors import InputError, UnavailableError
from tevatron.evaluator.answers import ScorerAnswerError, ScorerRefusedError, ScorersDifferError
from tevatron.evaluator.pool import Backend, PoolOptions, learn_served, stream_scores
from tevatron.evaluator.score_log import ScoreLog
from tevatron.evaluator.scoring import score_all

QUICK = PoolOptions(
    first_chunk=4,
    max_chunk=8,
    tries=2,
    backoff_s=0.01,
    cooldown_s=0.1,
    poll_s=0.02,
    timeout_s=5,
    busy_s=5,
)


def candidates(num_queries=3, num_passages=10):
    return [
        Candidate(
            query_id=f"q{q}", docid=f"d{d}", query=f"query {q}", text=f"passage {d} of query {q}"
        )
        for q in range(num_queries)
        for d in range(num_passages)
    ]


@pytest.fixture
def log(tmp_path):
    with ScoreLog(tmp_path / "scores.jsonl", identity="test") as log:
        yield log


def test_every_pair_gets_its_own_score(start_scorer, log):
    scorer = start_scorer()
    progress = []
    found = score_all(
        [Backend(url=scorer.url)], candidates(), log, options=QUICK, on_progress=progress.append
    )
    assert {q: len(by_docid) for q, by_docid in found.items()} == {"q0": 10, "q1": 10, "q2": 10}
    assert found["q1"]["d7"] == 2.0 - 0.005
    assert scorer.num_pairs == 30
    assert max(len(request.candidates) for request in scorer.requests) <= 8
    assert progress == sorted(progress)
    assert progress[-1] == 30


def test_token_goes_with_every_request_and_is_not_shown(start_scorer, log):
    scorer = start_scorer(token="secret")
    backend = Backend(url=scorer.url, token="secret")
    score_all([backend], candidates(1), log, options=QUICK)
    assert {request.authorization for request in scorer.requests} == {"Bearer secret"}
    assert "secret" not in repr(backend)


def test_wrong_token_is_refused_at_once(start_scorer, log):
    scorer = start_scorer(token="secret")
    with pytest.raises(ScorerRefusedError, match="401 unknown token"):
        score_all([Backend(url=scorer.url, token="other")], candidates(1), log, options=QUICK)


def test_two_backends_share_the_work(start_scorer, log):
    scorers = [start_scorer(), start_scorer()]
    for scorer in scorers:
        scorer.before_answer = lambda pairs: time.sleep(0.02)
    found = score_all([Backend(url=s.url) for s in scorers], candidates(6), log, options=QUICK)
    assert sum(len(by_docid) for by_docid in found.values()) == 60
    assert [s.num_pairs > 0 for s in scorers] == [True, True]
    assert sum(s.num_pairs for s in scorers) == 60


@pytest.mark.parametrize("status", [429, 503])
def test_busy_scorer_is_waited_for_as_long_as_it_asks(start_scorer, log, status):
    scorer = start_scorer()
    # More of them than `tries`: busy is not broken.
    scorer.answers.extend([(status, {"Retry-After": "0.2"}, {"detail": "queue is full"})] * 4)
    options = PoolOptions(first_chunk=30, max_chunk=30, tries=2, backoff_s=0.01, poll_s=0.02)
    started = time.monotonic()
    assert score_all([Backend(url=scorer.url)], candidates(), log, options=options)
    assert time.monotonic() - started > 0.75
    assert len(scorer.requests) == 5


def test_busy_for_too_long_is_down(start_scorer, log):
    scorer = start_scorer()
    scorer.answers.extend([(429, {}, {"detail": "queue is full"})] * 1000)
    options = PoolOptions(tries=2, backoff_s=0.01, max_backoff_s=0.02, poll_s=0.02, busy_s=0.3)
    with pytest.raises(UnavailableError, match="429 queue is full"):
        score_all([Backend(url=scorer.url)], candidates(), log, options=options)


def test_server_error_is_tried_again(start_scorer, log):
    scorer = start_scorer()
    scorer.answers.append((500, {}, b"oops"))
    assert len(score_all([Backend(url=scorer.url)], candidates(1), log, options=QUICK)["q0"]) == 10


def test_server_that_stays_broken_is_down_with_its_reason(start_scorer, log):
    scorer = start_scorer()
    scorer.answers.extend([(500, {}, b"oops")] * 20)
    with pytest.raises(
        UnavailableError, match=r"no scorer answers: http://127.*: 500 oops \(2 tries\)"
    ):
        score_all([Backend(url=scorer.url)], candidates(1), log, options=QUICK)


def test_dead_backend_leaves_its_chunks_to_the_other(start_scorer, log):
    dead, alive = start_scorer(), start_scorer()
    dead.stop = lambda stop=dead.stop: None
    dead._server.shutdown()
    dead._server.server_close()
    found = score_all(
        [Backend(url=dead.url), Backend(url=alive.url)], candidates(), log, options=QUICK
    )
    assert sum(len(by_docid) for by_docid in found.values()) == 30
    assert alive.num_pairs == 30


def test_no_backend_up_names_each(log, start_scorer):
    scorer = start_scorer()
    scorer._server.shutdown()
    scorer._server.server_close()
    scorer.stop = lambda: None
    with pytest.raises(UnavailableError, match=rf"{scorer.url}: ConnectError.*\(2 tries\)"):
        score_all([Backend(url=scorer.url)], candidates(1), log, options=QUICK)
    with pytest.raises(UnavailableError, match="no scorer to send pairs to"):
        score_all([], candidates(1), log)


def test_backend_that_was_down_is_tried_again(start_scorer, log):
    flaky, slow = start_scorer(), start_scorer()
    flaky.answers.extend([(500, {}, b"")] * 4)
    slow.before_answer = lambda pairs: time.sleep(0.1)
    score_all([Backend(url=flaky.url), Backend(url=slow.url)], candidates(12), log, options=QUICK)
    assert len(flaky.requests) > 4


def test_hanging_backend_times_out_and_the_other_goes_on(start_scorer, log):
    hanging, alive = start_scorer(), start_scorer()
    release = threading.Event()
    hanging.before_answer = lambda pairs: release.wait(10)
    options = PoolOptions(first_chunk=4, tries=1, poll_s=0.02, timeout_s=0.3, cooldown_s=5)
    found = score_all(
        [Backend(url=hanging.url), Backend(url=alive.url)], candidates(), log, options=options
    )
    release.set()
    assert sum(len(by_docid) for by_docid in found.values()) == 30


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda scores: scores.pop(), "gave 3 scores for 4 pairs"),
        (lambda scores: scores.append(scores[0]), "gave 5 scores for 4 pairs"),
        (
            lambda scores: scores.__setitem__(1, scores[0]),
            r"answered for pair \('q0', 'd0'\) where \('q0', 'd1'\)",
        ),
        (lambda scores: scores.reverse(), r"answered for pair \('q0', 'd3'\) where \('q0', 'd0'\)"),
        (lambda scores: scores[2].update(score=float("nan")), r"scores\.2\.score.*finite"),
        (lambda scores: scores[2].update(score=float("inf")), r"scores\.2\.score.*finite"),
        (lambda scores: scores[2].update(score=None), r"scores\.2\.score"),
        (lambda scores: scores[2].update(missing=True), "its score of pair .* is missing"),
    ],
)
def test_answer_that_is_not_what_was_asked_is_an_error(start_scorer, log, spoil, says):
    scorer = start_scorer()

    def answer(pairs):
        body = scorer.scores(pairs)
        spoil(body["scores"])
        return body

    scorer.answers.extend([answer] * 4)
    with pytest.raises(ScorerAnswerError, match=says):
        score_all([Backend(url=scorer.url)], candidates(1, 4), log, options=QUICK)
    assert len(log) == 0


def test_answer_that_is_no_json_is_an_error(start_scorer, log):
    scorer = start_scorer()
    scorer.answers.append((200, {}, b"<html>"))
    with pytest.raises(ScorerAnswerError, match="Invalid JSON"):
        score_all([Backend(url=scorer.url)], candidates(1, 4), log, options=QUICK)


def test_pair_that_cannot_be_scored_is_the_users_error(start_scorer, log):
    scorer = start_scorer()
    scorer.answers.append((422, {}, {"detail": "query 'q0' alone takes 600 of 512 tokens"}))
    with pytest.raises(
        InputError, match=r"refused 4 pairs of queries \['q0'\]: 422 query 'q0' alone takes 600"
    ):
        score_all([Backend(url=scorer.url)], candidates(1, 4), log, options=QUICK)


def test_too_large_request_is_halved(start_scorer, log):
    scorer = start_scorer()

    def refuse_more_than_two(pairs):
        assert len(pairs) <= 2
        return scorer.scores(pairs)

    scorer.answers.extend([(413, {}, {"detail": "too large"})] * 2)
    scorer.answers.extend([refuse_more_than_two] * 8)
    options = PoolOptions(first_chunk=8, max_chunk=8, slots=1, poll_s=0.02)
    assert (
        len(score_all([Backend(url=scorer.url)], candidates(1, 8), log, options=options)["q0"]) == 8
    )


def test_single_pair_that_is_too_large_is_named(start_scorer, log):
    scorer = start_scorer()
    scorer.answers.append((413, {}, {"detail": "too large"}))
    with pytest.raises(
        InputError, match="one pair too large: query 'q0', document 'd0', 7 and 20 characters"
    ):
        score_all([Backend(url=scorer.url)], candidates(1, 1), log, options=QUICK)


def test_retried_attempt_does_not_score_twice(start_scorer, tmp_path):
    path = tmp_path / "scores.jsonl"
    scorer = start_scorer()

    def stop_after_three():
        if len(scorer.requests) >= 3:
            raise KeyboardInterrupt

    one_by_one = PoolOptions(first_chunk=4, max_chunk=4, slots=1, poll_s=0.02)
    scorer.before_answer = lambda pairs: time.sleep(0.05)
    with ScoreLog(path, identity="x") as log, pytest.raises(KeyboardInterrupt):
        score_all(
            [Backend(url=scorer.url)], candidates(), log, options=one_by_one, check=stop_after_three
        )
    with ScoreLog(path, identity="x") as log:
        kept = len(log)
        assert 4 <= kept < 30
        again = start_scorer()
        found = score_all([Backend(url=again.url)], candidates(), log, options=one_by_one)
        assert again.num_pairs == 30 - kept
        assert sum(len(by_docid) for by_docid in found.values()) == 30
    with ScoreLog(path, identity="x") as log:
        # All of it is there: no scorer is needed any more.
        assert (
            score_all([Backend(url="http://127.0.0.1:9")], candidates(), log, options=QUICK)
            == found
        )


def test_stop_ends_a_request_in_flight(start_scorer, log):
    scorer = start_scorer()
    release = threading.Event()
    scorer.before_answer = lambda pairs: release.wait(20)

    def stop_once_asked():
        if scorer.requests:
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        score_all(
            [Backend(url=scorer.url)], candidates(), log, options=QUICK, check=stop_once_asked
        )
    assert time.monotonic() - started < 3
    release.set()


def test_pairs_of_the_same_texts_are_scored_once(start_scorer, log):
    scorer = start_scorer()
    twins = [Candidate(query_id="q", docid=f"d{i}", query="a b", text="b c") for i in range(5)]
    found = score_all([Backend(url=scorer.url)], twins, log, options=QUICK)
    assert found == {"q": dict.fromkeys(["d0", "d1", "d2", "d3", "d4"], 1.0 - 0.002)}
    assert scorer.num_pairs == 1


def test_document_that_stands_twice_among_the_candidates_is_refused(start_scorer, log):
    scorer = start_scorer()
    with pytest.raises(
        InputError, match="document 'd0' stands twice among the candidates of query 'q0'"
    ):
        score_all([Backend(url=scorer.url)], candidates(1, 1) * 2, log, options=QUICK)


def test_chunks_grow_with_the_scorers_speed(start_scorer, log):
    scorer = start_scorer()
    options = PoolOptions(first_chunk=2, max_chunk=64, slots=1, poll_s=0.02)
    score_all([Backend(url=scorer.url)], candidates(20), log, options=options)
    sizes = [len(request.candidates) for request in scorer.requests]
    assert sizes[:6] == [2, 4, 8, 16, 32, 64]


def test_chunks_shrink_where_the_scorer_is_slow(start_scorer, log):
    scorer = start_scorer()
    scorer.before_answer = lambda pairs: time.sleep(0.05 * len(pairs))
    options = PoolOptions(first_chunk=8, max_chunk=64, slots=1, chunk_s=0.1, poll_s=0.02)
    score_all([Backend(url=scorer.url)], candidates(1, 12), log, options=options)
    assert [len(request.candidates) for request in scorer.requests][:2] in ([8, 1], [8, 2])


def test_proxy_of_the_environment_is_not_used(start_scorer, log, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    scorer = start_scorer()
    assert score_all([Backend(url=scorer.url)], candidates(1), log, options=QUICK)


def test_chunk_goes_to_another_backend_while_its_own_pauses(start_scorer, log):
    broken, alive = start_scorer(), start_scorer()
    broken.answers.extend([(500, {}, b"oops")] * 100)
    options = PoolOptions(first_chunk=4, max_chunk=4, backoff_s=30, max_backoff_s=30, poll_s=0.02)
    started = time.monotonic()
    found = score_all(
        [Backend(url=broken.url), Backend(url=alive.url)], candidates(), log, options=options
    )
    assert time.monotonic() - started < 10
    assert sum(len(by_docid) for by_docid in found.values()) == 30
    assert alive.num_pairs == 30


def test_slowest_chunk_is_asked_of_an_idle_backend_too(start_scorer, log):
    hanging, quick = start_scorer(), start_scorer()
    release = threading.Event()
    hanging.before_answer = lambda pairs: release.wait(30)
    options = PoolOptions(first_chunk=4, max_chunk=4, poll_s=0.02, hedge_s=0.2, timeout_s=60)
    started = time.monotonic()
    found = score_all(
        [Backend(url=hanging.url), Backend(url=quick.url)], candidates(), log, options=options
    )
    assert time.monotonic() - started < 10
    release.set()
    assert sum(len(by_docid) for by_docid in found.values()) == 30
    assert 4 <= hanging.num_pairs <= 8
    assert quick.num_pairs == 30
    # One score a pair came in, whoever answered.
    lines = [json.loads(line) for line in log._path.read_text().splitlines()]
    assert sum(len(line["scores"]) for line in lines) == 30


def test_nothing_is_hedged_while_no_chunk_is_late(start_scorer, log):
    scorers = [start_scorer(), start_scorer()]
    for scorer in scorers:
        scorer.before_answer = lambda pairs: time.sleep(0.05)
    score_all([Backend(url=s.url) for s in scorers], candidates(), log, options=QUICK)
    assert sum(s.num_pairs for s in scorers) == 30


def test_chunk_whose_first_backend_fails_while_a_second_one_helps_is_not_asked_again(
    start_scorer, log
):
    failing, helping = start_scorer(), start_scorer()
    asked_too = threading.Event()

    def fail_once_helped(pairs):
        asked_too.wait(10)
        raise ConnectionResetError

    def help_slowly(pairs):
        if asked_too.is_set():
            return
        if failing.requests and any(pairs == request.candidates for request in failing.requests):
            asked_too.set()
            time.sleep(0.3)

    failing.before_answer, helping.before_answer = fail_once_helped, help_slowly
    options = PoolOptions(
        first_chunk=4, max_chunk=4, slots=1, poll_s=0.02, hedge_s=0.1, tries=1, cooldown_s=30
    )
    found = score_all(
        [Backend(url=failing.url), Backend(url=helping.url)], candidates(), log, options=options
    )
    assert sum(len(by_docid) for by_docid in found.values()) == 30
    assert helping.num_pairs == 30


def test_requests_in_flight_are_bounded_over_all_backends(start_scorer, log):
    scorers = [start_scorer(), start_scorer()]
    working, most = [0], [0]
    lock = threading.Lock()

    def count(pairs):
        with lock:
            working[0] += 1
            most[0] = max(most[0], working[0])
        time.sleep(0.02)
        with lock:
            working[0] -= 1

    for scorer in scorers:
        scorer.before_answer = count
    options = PoolOptions(first_chunk=4, max_chunk=4, poll_s=0.02, max_in_flight=1)
    score_all([Backend(url=s.url) for s in scorers], candidates(), log, options=options)
    assert most == [1]


def test_prefixes_are_sent_where_they_are_given(start_scorer, log):
    scorer = start_scorer()
    bodies = []
    scorer.on_body = bodies.append
    options = PoolOptions(query_prefix="query:", passage_prefix="passage:")
    score_all([Backend(url=scorer.url)], candidates(1, 1), log, options=options)
    assert [(body["query_prefix"], body["passage_prefix"]) for body in bodies] == [
        ("query:", "passage:")
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"contract_sha256": "d" * 64}, "contract_sha256 is 'cccc.*' at {0} and 'dddd.*' at {1}"),
        (
            {"prompt_template": "relevant"},
            "prompt_template is 'tevatron' at {0} and 'relevant' at {1}",
        ),
        ({"max_length": 256}, "max_length is 512 at {0} and 256 at {1}"),
        ({"dtype": "bfloat16"}, "dtype is 'float32' at {0} and 'bfloat16' at {1}"),
        ({"contract_sha256": None}, "contract_sha256 is 'cccc.*' at {0} and None at {1}"),
    ],
)
def test_backends_that_serve_different_things_are_refused_naming_both(
    start_scorer, log, change, says
):
    one, other = start_scorer(), start_scorer()
    other.info |= change
    backends = [Backend(url=one.url), Backend(url=other.url)]
    served = learn_served(backends[:1], options=QUICK)
    with pytest.raises(ScorersDifferError, match=says.format(one.url, other.url)):
        score_all(backends, candidates(), log, served=served, options=QUICK)
    with pytest.raises(
        ScorersDifferError, match=f"({one.url}.*{other.url}|{other.url}.*{one.url})"
    ):
        learn_served(backends, options=QUICK)


def test_scorers_without_a_contract_are_compared_by_their_scores(start_scorer, log):
    one, same, worse = start_scorer(), start_scorer(), start_scorer()
    for scorer in (one, same, worse):
        # What the reference's server says, which knows no contract.
        scorer.info = {"backend": "vllm", "model_name_or_path": "m", "prompt_template": "tevatron"}
    worse.worsen()
    served = learn_served([Backend(url=one.url), Backend(url=same.url)], options=QUICK)
    assert served.probe_scores is not None
    assert {c["query_id"] for r in one.requests for c in r.candidates} == {"tevatron-probe"}
    with pytest.raises(ScorersDifferError, match="the probe 'how do bees find flowers' scores"):
        learn_served([Backend(url=one.url), Backend(url=worse.url)], options=QUICK)
    assert served.identity != learn_served([Backend(url=worse.url)], options=QUICK).identity
    assert served.identity == learn_served([Backend(url=same.url)], options=QUICK).identity


def test_what_does_not_say_what_it_serves_is_no_scorer(start_scorer, log):
    scorer = start_scorer()
    for info, says in (
        (None, "404 not found: expected 200 from GET /info"),
        ({}, "expected prompt_template"),
    ):
        scorer.info = info
        with pytest.raises(ScorerRefusedError, match=says):
            score_all([Backend(url=scorer.url)], candidates(1), log, options=QUICK)
    assert scorer.num_pairs == 0


def test_backend_that_comes_back_with_another_checkpoint_is_refused(start_scorer, log):
    changing, steady = start_scorer(), start_scorer()
    steady.before_answer = lambda pairs: time.sleep(0.05)
    changing.answers.extend([(500, {}, b"")] * 4)

    def change():
        if len(changing.requests) >= 2:
            changing.info["contract_sha256"] = "d" * 64

    with pytest.raises(ScorersDifferError, match=f"at {changing.url}"):
        score_all(
            [Backend(url=steady.url), Backend(url=changing.url)],
            candidates(20),
            log,
            options=QUICK,
            check=change,
        )


def test_one_backend_that_answers_is_enough_to_learn_what_is_served(start_scorer):
    scorer = start_scorer()
    backends = [Backend(url="http://127.0.0.1:9"), Backend(url=scorer.url)]
    assert learn_served(backends, options=QUICK).url == scorer.url
    with pytest.raises(
        UnavailableError, match=r"no scorer answers: http://127\.0\.0\.1:9: ConnectError"
    ):
        learn_served(backends[:1], options=QUICK)


def test_scores_are_handed_over_once_under_their_keys(start_scorer):
    scorers = [start_scorer(), start_scorer()]
    found = []
    stream_scores(
        [Backend(url=s.url) for s in scorers],
        enumerate(candidates()),
        lambda keys, scores: found.extend(zip(keys, scores, strict=True)),
        options=QUICK,
    )
    assert sorted(found) == list(
        enumerate(
            score["score"]
            for score in scorers[0].scores([c.model_dump() for c in candidates()])["scores"]
        )
    )


def test_same_document_with_two_texts_is_refused_before_it_is_sent(start_scorer, log):
    scorer = start_scorer()
    twice = [Candidate(query_id="q", docid="d", query="a", text=text) for text in ("b", "c")]
    with pytest.raises(
        InputError, match="document 'd' stands twice among the candidates of query 'q'"
    ):
        score_all([Backend(url=scorer.url)], twice, log, options=QUICK)
    assert scorer.num_pairs == 0


def test_backend_that_is_replaced_in_a_moment_is_asked_again_what_it_serves(start_scorer, log):
    first = start_scorer()

    def replace(pairs):
        if len(first.requests) == 3:
            first.kill()
            start_scorer(port=first.port).info["contract_sha256"] = "d" * 64

    first.before_answer = replace
    with pytest.raises(ScorersDifferError, match=r"contract_sha256 is 'cccc.* and 'dddd"):
        score_all([Backend(url=first.url)], candidates(20), log, options=QUICK)


def test_very_late_chunk_is_helped_while_there_is_other_work(start_scorer):
    hanging, quick = start_scorer(), start_scorer()
    release = threading.Event()
    hanging.before_answer = lambda pairs: release.wait(30)
    quick.before_answer = lambda pairs: time.sleep(0.02)
    options = PoolOptions(first_chunk=4, max_chunk=4, poll_s=0.02, hedge_s=0.05, timeout_s=60)
    order = []
    stream_scores(
        [Backend(url=hanging.url), Backend(url=quick.url)],
        enumerate(candidates(20)),
        lambda keys, scores: order.extend(keys),
        options=options,
    )
    release.set()
    assert sorted(order) == list(range(200))
    # The first pairs are not the last to come: whoever waits for them need not wait for all.
    assert max(order.index(key) for key in range(16)) < 190
