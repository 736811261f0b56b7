"""How many jobs of a key may be queued and run, whoever comes at once."""

from __future__ import annotations

import threading

import pytest
from tests.support.store import eval_job, job, register, train_job

from tevatron.core.contracts.jobs import FailReason, From, JobKind, Rerank
from tevatron.core.errors import NotFoundError
from tevatron.core.store.claims import claim_next_job, fail, succeed
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.limits import TooManyJobsError


@pytest.fixture
def make_key(sessions):
    def make(**limits):
        with sessions.begin() as session:
            key, _ = KeyRepository(session).create("limited", **limits)
            register(session, key_id=key.id)
            return key.id

    return make


def submit(sessions, key_id, *, count=1):
    with sessions.begin() as session:
        specs = {f"job{number}": eval_job() for number in range(count)}
        return [row.id for row in JobRepository(session).submit(specs, key_id=key_id)]


def claim(sessions):
    with sessions.begin() as session:
        return claim_next_job(session, list(JobKind), worker="w", lease_s=60)


def at_once(work, *, threads):
    """Run `work` in several threads that begin together, and return what each gave."""
    barrier, results = threading.Barrier(threads), []

    def run():
        barrier.wait()
        results.append(work())

    started = [threading.Thread(target=run) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return results


def test_a_submission_beyond_the_limit_is_refused_with_both_numbers_and_stores_nothing(
    sessions, make_key
):
    key_id = make_key(max_queued=3)
    submit(sessions, key_id, count=2)
    with pytest.raises(
        TooManyJobsError, match=r"would have 4 jobs .* it may have 3 \(max_queued\)"
    ):
        submit(sessions, key_id, count=2)
    submit(sessions, key_id)
    with sessions() as session:
        assert len(JobRepository(session).list_jobs(key_id=key_id).items) == 3


def test_what_runs_and_what_has_ended_is_not_queued(sessions, make_key):
    key_id = make_key(max_queued=1)
    submit(sessions, key_id)
    held = claim(sessions)
    submit(sessions, key_id)
    with sessions.begin() as session:
        fail(session, held, reason=FailReason.OUT_OF_MEMORY, message="too large")
    with pytest.raises(TooManyJobsError), sessions.begin() as session:
        JobRepository(session).resume(held.job_id, key_id=key_id)
    assert job(sessions, held.job_id).state == "failed"


def test_a_job_that_waits_for_another_counts(sessions, make_key):
    key_id = make_key(max_queued=1)
    specs = {
        "tune": train_job(),
        "table": eval_job(rerank=Rerank(checkpoint=From.model_validate({"from": "tune"}))),
    }
    with pytest.raises(TooManyJobsError, match="have 2 jobs"), sessions.begin() as session:
        JobRepository(session).submit(specs, key_id=key_id)


def test_submissions_at_once_do_not_pass_the_limit(sessions, make_key):
    key_id = make_key(max_queued=3)

    def work():
        try:
            return len(submit(sessions, key_id))
        except TooManyJobsError:
            return 0

    assert sum(at_once(work, threads=8)) == 3


def test_jobs_beyond_the_limit_stay_queued_and_say_why(sessions, make_key):
    limited, free = make_key(max_running=1), make_key()
    first, second = submit(sessions, limited, count=2)
    [other] = submit(sessions, free)
    held = claim(sessions)
    assert held.job_id == first
    with sessions() as session:
        why = JobRepository(session).held_back([first, second, other])
    assert why == {second: "its key runs 1, as many as it may (max_running)"}
    assert claim(sessions).job_id == other
    assert claim(sessions) is None
    with sessions.begin() as session:
        succeed(session, held, {})
    assert claim(sessions).job_id == second


def test_claims_at_once_do_not_pass_the_limit(sessions, make_key):
    key_id = make_key(max_running=2)
    submit(sessions, key_id, count=8)
    claims = at_once(lambda: claim(sessions), threads=8)
    assert sum(held is not None for held in claims) == 2


def test_limits_are_changed_and_lifted(sessions, make_key):
    key_id = make_key(max_queued=1, max_running=1)
    submit(sessions, key_id)
    with sessions.begin() as session:
        KeyRepository(session).limit(key_id, max_queued=None, max_running=2)
    submit(sessions, key_id, count=3)
    assert [claim(sessions) is not None for _ in range(3)] == [True, True, False]
    with sessions.begin() as session, pytest.raises(NotFoundError, match="no API key 'key_0'"):
        KeyRepository(session).limit("key_0", max_queued=1, max_running=None)


def test_jobs_without_a_key_have_no_limit(sessions, make_key):
    make_key(max_queued=1, max_running=1)
    with sessions.begin() as session:
        register(session)
    submit(sessions, None, count=3)
    assert [claim(sessions) is not None for _ in range(3)] == [True] * 3
