"""Resuming: a cancelled or failed job goes on as itself, and so do the jobs that failed because of it."""

from __future__ import annotations

import pytest
from tests.support.store import eval_job, job, publish_checkpoint, states, submit, train_job

from tevatron.core.contracts.jobs import FailReason, JobKind, JobState, Phase
from tevatron.core.errors import ConflictError, NotFoundError
from tevatron.core.store.claims import claim_next_job, fail, succeed
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.models import Job
from tevatron.core.store.outbox import settle_waiting


def resume(sessions, job_id: str) -> None:
    with sessions.begin() as session:
        JobRepository(session).resume(job_id, key_id=None)


def cancel(sessions, job_id: str) -> None:
    with sessions.begin() as session:
        JobRepository(session).request_cancel(job_id, key_id=None)


def settle(sessions) -> None:
    with sessions.begin() as session:
        settle_waiting(session)


def fail_next(sessions) -> None:
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
        assert claim is not None
        fail(session, claim, reason=FailReason.DATA_ERROR, message="line 17")


def test_a_cancelled_job_is_queued_again(sessions):
    [job_id] = submit(sessions, tune=train_job())
    cancel(sessions, job_id)
    resume(sessions, job_id)
    row = job(sessions, job_id)
    assert (row.state, row.finished_at, row.published_at) == (JobState.QUEUED, None, None)
    assert states(sessions, job_id) == ["queued", "cancelled", "queued"]


def test_a_failed_job_forgets_why_and_its_next_attempt_has_the_next_number(sessions):
    [job_id] = submit(sessions, tune=train_job())
    fail_next(sessions)
    resume(sessions, job_id)
    row = job(sessions, job_id)
    assert (row.state, row.reason, row.message, row.lost_attempts) == (
        JobState.QUEUED,
        None,
        None,
        0,
    )
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
    assert claim is not None
    assert (claim.job_id, claim.attempt) == (job_id, 2)


def test_a_resumed_training_is_not_stopped_again_by_an_old_request(sessions):
    [job_id] = submit(sessions, tune=train_job())
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
        assert claim is not None
        row = session.get_one(Job, job_id)
        row.state, row.phase = JobState.RUNNING, Phase.TRAINING
        JobRepository(session).request_stop(job_id, key_id=None)
        fail(session, claim, reason=FailReason.OUT_OF_MEMORY, message="in the last step")
    resume(sessions, job_id)
    assert job(sessions, job_id).stop_requested_at is None


def test_jobs_that_failed_for_it_wait_for_it_again_and_use_what_it_makes(sessions):
    spec = eval_job(rerank={"checkpoint": {"from": "tune"}})
    tune, check = submit(sessions, tune=train_job(), check=spec)
    fail_next(sessions)
    settle(sessions)
    assert job(sessions, check).reason is FailReason.DEPENDENCY_FAILED
    resume(sessions, tune)
    settle(sessions)
    assert job(sessions, check).state is JobState.WAITING
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
        checkpoint = publish_checkpoint(session, tune)
        succeed(session, claim, {"checkpoint_id": checkpoint})
    settle(sessions)
    row = job(sessions, check)
    assert (row.state, row.resolved["rerank"]["checkpoint"]) == (JobState.QUEUED, checkpoint)


def test_a_dependent_that_somebody_cancelled_stays_cancelled(sessions):
    spec = eval_job(rerank={"checkpoint": {"from": "tune"}})
    tune, check = submit(sessions, tune=train_job(), check=spec)
    cancel(sessions, check)
    cancel(sessions, tune)
    resume(sessions, tune)
    assert job(sessions, check).state is JobState.CANCELLED


def test_a_resumed_dependent_of_a_failed_job_fails_for_it_again(sessions):
    spec = eval_job(rerank={"checkpoint": {"from": "tune"}})
    tune, check = submit(sessions, tune=train_job(), check=spec)
    cancel(sessions, tune)
    settle(sessions)
    resume(sessions, check)
    settle(sessions)
    assert job(sessions, check).reason is FailReason.DEPENDENCY_FAILED


@pytest.mark.parametrize("state", ["queued", "running", "succeeded"])
def test_what_has_not_ended_badly_is_not_resumed(sessions, state):
    [job_id] = submit(sessions, tune=train_job())
    if state != "queued":
        with sessions.begin() as session:
            claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
            if state == "succeeded":
                succeed(session, claim, {})
    with pytest.raises(ConflictError, match="only one that was cancelled or has failed"):
        resume(sessions, job_id)


def test_another_keys_job_is_not_found(sessions):
    [job_id] = submit(sessions, tune=train_job())
    cancel(sessions, job_id)
    with sessions.begin() as session, pytest.raises(NotFoundError):
        JobRepository(session).resume(job_id, key_id="key_other")
