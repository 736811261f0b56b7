"""Scorers: wanted, claimed by one host, ready, let go; taken over when a host dies."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError
from tests.core.store.test_claims import cancel, claim, do
from tests.support.store import eval_job, publish_checkpoint, submit, train_job

from tevatron.core.contracts.jobs import JobKind
from tevatron.core.errors import NotFoundError
from tevatron.core.store.claims import succeed
from tevatron.core.store.leases import LeaseLostError
from tevatron.core.store.models import Scorer
from tevatron.core.store.outbox import reap
from tevatron.core.store.scorers import (
    ScorerRepository,
    ScorerTarget,
    beat_scorer,
    claim_next_scorer,
    release_scorer,
    request_scorer,
    scorer_failed,
    scorer_ready,
    scorer_restarting,
    scorer_stopped,
)


@pytest.fixture
def checkpoint(sessions):
    [job_id] = submit(sessions, tune=train_job())
    with sessions.begin() as session:
        return publish_checkpoint(session, job_id)


@pytest.fixture
def target(checkpoint):
    return ScorerTarget(checkpoint_id=checkpoint, dtype="float32")


def take(sessions, host="h1", lease_s=60.0):
    return do(sessions, claim_next_scorer, host=host, lease_s=lease_s)


def ready(sessions, held, port=1):
    return do(
        sessions,
        scorer_ready,
        held,
        url=f"http://host:{port}",
        token="secret",
        info={"max_probe_difference": 0.0},
    )


def test_a_host_claims_what_its_engines_can_serve(sessions, checkpoint):
    wanted = ScorerTarget(checkpoint_id=checkpoint, engine="vllm")
    scorer_id = do(sessions, request_scorer, wanted, key_id=None)
    assert do(sessions, claim_next_scorer, host="h", lease_s=60.0, engines=["hf"]) is None
    claim = do(sessions, claim_next_scorer, host="h", lease_s=60.0, engines=["hf", "vllm"])
    assert (claim.scorer_id, claim.target.engine) == (scorer_id, "vllm")


def end_leases(sessions):
    with sessions.begin() as session:
        session.execute(text("UPDATE scorers SET lease_until = now() - interval '1 hour'"))


def row(sessions, scorer_id):
    with sessions() as session:
        return session.get_one(Scorer, scorer_id)


def reap_now(sessions, max_attempts=5):
    return do(sessions, reap, grace_s=0.0, max_attempts=max_attempts).scorers


def test_the_whole_life(sessions, target):
    scorer_id = do(sessions, request_scorer, target, key_id=None, name="mine")
    held = take(sessions)
    assert (held.scorer_id, held.target, held.fence) == (scorer_id, target, 1)
    assert row(sessions, scorer_id).state == "starting"
    assert do(sessions, beat_scorer, held, 60.0).stop_requested is False
    assert ready(sessions, held) is True
    found = row(sessions, scorer_id)
    assert (found.state, found.url, found.token, found.holder) == (
        "ready",
        "http://host:1",
        "secret",
        "h1",
    )
    assert found.info == {"max_probe_difference": 0.0}
    do(sessions, release_scorer, scorer_id)
    assert row(sessions, scorer_id).state == "stopping"
    assert do(sessions, beat_scorer, held, 60.0).stop_requested is True
    do(sessions, scorer_stopped, held)
    found = row(sessions, scorer_id)
    assert (found.state, found.url, found.token) == ("stopped", None, None)
    do(sessions, release_scorer, scorer_id)
    assert row(sessions, scorer_id).state == "stopped"


def test_ten_scorers_and_four_hosts_at_once_make_ten_claims(sessions, target):
    ids = [do(sessions, request_scorer, target, key_id=None) for _ in range(10)]
    claimed: Counter[str] = Counter()
    start = threading.Barrier(4)

    def work():
        start.wait()
        while (held := take(sessions)) is not None:
            claimed[held.scorer_id] += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert claimed == Counter(ids)


def test_a_job_that_asks_again_gets_the_scorer_that_it_has(sessions, target):
    [job_id] = submit(sessions, check=eval_job())
    first = do(sessions, request_scorer, target, key_id=None, job_id=job_id)
    assert do(sessions, request_scorer, target, key_id=None, job_id=job_id) == first
    ready(sessions, take(sessions))
    assert do(sessions, request_scorer, target, key_id=None, job_id=job_id) == first
    do(sessions, release_scorer, first)
    second = do(sessions, request_scorer, target, key_id=None, job_id=job_id)
    assert second != first


def test_two_attempts_of_a_job_cannot_have_two_live_scorers(sessions, target):
    [job_id] = submit(sessions, check=eval_job())
    ids: list[str] = []
    threads = [
        threading.Thread(
            target=lambda: ids.append(
                do(sessions, request_scorer, target, key_id=None, job_id=job_id)
            )
        )
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 6
    assert len(set(ids)) == 1


def test_one_that_nobody_serves_yet_is_stopped_at_once(sessions, target):
    scorer_id = do(sessions, request_scorer, target, key_id=None)
    do(sessions, release_scorer, scorer_id)
    assert row(sessions, scorer_id).state == "stopped"
    assert take(sessions) is None


def test_one_that_was_let_go_while_it_started_does_not_become_ready(sessions, target):
    scorer_id = do(sessions, request_scorer, target, key_id=None)
    held = take(sessions)
    do(sessions, release_scorer, scorer_id)
    assert ready(sessions, held) is False
    assert do(sessions, scorer_restarting, held) is False
    assert row(sessions, scorer_id).state == "stopping"


def test_a_restarted_server_has_no_url_until_it_is_ready_again(sessions, target):
    scorer_id = do(sessions, request_scorer, target, key_id=None)
    held = take(sessions)
    ready(sessions, held)
    assert do(sessions, scorer_restarting, held) is True
    found = row(sessions, scorer_id)
    assert (found.state, found.url, found.token) == ("starting", None, None)
    assert ready(sessions, held, port=2) is True
    assert row(sessions, scorer_id).url == "http://host:2"


def test_a_failed_one_says_why(sessions, target):
    scorer_id = do(sessions, request_scorer, target, key_id=None)
    do(sessions, scorer_failed, take(sessions), "probe 3: 0.4 apart")
    found = row(sessions, scorer_id)
    assert (found.state, found.error) == ("failed", "probe 3: 0.4 apart")
    assert take(sessions) is None


def test_a_host_that_shuts_down_gives_its_scorer_to_the_next(sessions, target):
    scorer_id = do(sessions, request_scorer, target, key_id=None)
    held = take(sessions)
    ready(sessions, held)
    do(sessions, scorer_stopped, held)
    found = row(sessions, scorer_id)
    assert (found.state, found.url, found.lost_attempts) == ("wanted", None, 0)
    assert take(sessions, host="h2").scorer_id == scorer_id


def test_a_dead_hosts_scorer_goes_to_the_next_and_the_dead_one_cannot_write(sessions, target):
    scorer_id = do(sessions, request_scorer, target, key_id=None)
    stale = take(sessions)
    ready(sessions, stale)
    assert reap_now(sessions) == []
    end_leases(sessions)
    assert reap_now(sessions) == [scorer_id]
    assert row(sessions, scorer_id).state == "wanted"
    fresh = take(sessions, host="h2")
    assert fresh.fence == 2
    for write in (
        lambda session: beat_scorer(session, stale, 60.0),
        lambda session: scorer_ready(session, stale, url="http://old", token="x", info={}),
        lambda session: scorer_failed(session, stale, "x"),
        lambda session: scorer_stopped(session, stale),
        lambda session: scorer_restarting(session, stale),
    ):
        with pytest.raises(LeaseLostError):
            do(sessions, write)
    assert row(sessions, scorer_id).holder == "h2"


def test_one_that_kills_every_host_fails(sessions, target):
    scorer_id = do(sessions, request_scorer, target, key_id=None)
    for _ in range(2):
        take(sessions)
        end_leases(sessions)
        reap_now(sessions, max_attempts=2)
    found = row(sessions, scorer_id)
    assert (found.state, found.error) == (
        "failed",
        "2 hosts were lost while they served it, h1 last",
    )


def test_a_dead_host_has_stopped_what_was_let_go(sessions, target):
    scorer_id = do(sessions, request_scorer, target, key_id=None)
    take(sessions)
    do(sessions, release_scorer, scorer_id)
    end_leases(sessions)
    reap_now(sessions)
    assert row(sessions, scorer_id).state == "stopped"


@pytest.mark.parametrize("served", [True, False])
def test_the_scorer_of_a_job_that_is_over_is_let_go(sessions, target, served):
    first, second = submit(sessions, check=eval_job(), other=eval_job())
    scorers = [
        do(sessions, request_scorer, target, key_id=None, job_id=job_id)
        for job_id in (first, second)
    ]
    if served:
        ready(sessions, take(sessions))
    held = claim(sessions, "eval")
    do(sessions, succeed, held, {})
    assert reap_now(sessions) == [scorers[0]]
    assert row(sessions, scorers[0]).state == ("stopping" if served else "stopped")
    assert row(sessions, scorers[1]).state == "wanted"
    cancel(sessions, second)
    assert reap_now(sessions) == [scorers[1]]


def test_a_queued_jobs_scorer_makes_room_for_one_that_waits(sessions, target):
    (first, second) = submit(sessions, a=eval_job(), b=eval_job())
    with sessions.begin() as session:
        held = request_scorer(session, target, key_id=None, job_id=first)
        claim_next_scorer(session, host="h", lease_s=60)
    assert do(sessions, reap, grace_s=0, max_attempts=3).scorers == []
    with sessions.begin() as session:
        request_scorer(session, target, key_id=None, job_id=second)
    assert do(sessions, reap, grace_s=0, max_attempts=3).scorers == [held]
    with sessions() as session:
        assert session.get_one(Scorer, held).state == "stopping"


def test_a_claimed_jobs_scorer_stays_whoever_waits(sessions, target):
    (first, second) = submit(sessions, a=eval_job(), b=eval_job())
    assert claim(sessions, JobKind.EVAL).job_id == first
    with sessions.begin() as session:
        request_scorer(session, target, key_id=None, job_id=first)
        claim_next_scorer(session, host="h", lease_s=60)
        request_scorer(session, target, key_id=None, job_id=second)
    assert do(sessions, reap, grace_s=0, max_attempts=3).scorers == []


def test_one_that_nobody_uses_for_its_time_to_live_is_let_go(sessions, target):
    idle = do(sessions, request_scorer, target, key_id=None, ttl_s=60.0)
    for_ever = do(sessions, request_scorer, target, key_id=None)
    for _ in range(2):
        ready(sessions, take(sessions))
    age = text("UPDATE scorers SET last_used_at = now() - interval '61 s'")
    do(sessions, lambda session: session.execute(age))
    do(sessions, lambda session: ScorerRepository(session).touch([idle]))
    assert reap_now(sessions) == []
    do(sessions, lambda session: session.execute(age))
    assert reap_now(sessions) == [idle]
    assert row(sessions, for_ever).state == "ready"


def test_an_external_one_is_seen_by_every_key_and_never_reaped_or_claimed(sessions, target):
    with sessions.begin() as session:
        repository = ScorerRepository(session)
        scorer_id = repository.register_external(
            "https://scores.example/x", key_id=None, name="outside", token=None, engine="hf"
        ).id
    with sessions() as session:
        assert ScorerRepository(session).get_live("outside", key_id="key_other").id == scorer_id
    assert take(sessions) is None
    assert reap_now(sessions) == []
    do(sessions, release_scorer, scorer_id)
    assert row(sessions, scorer_id).state == "stopped"


def test_exactly_one_target_is_stored(sessions, checkpoint):
    for target in (ScorerTarget(), ScorerTarget(checkpoint_id=checkpoint, model_id="model_x")):
        with pytest.raises(IntegrityError, match="ck_scorers_target"):
            do(sessions, request_scorer, target, key_id=None)


def test_an_unknown_one_cannot_be_let_go(sessions):
    with pytest.raises(NotFoundError):
        do(sessions, release_scorer, "scorer_0")
