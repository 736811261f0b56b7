"""The state machine under random histories: whatever happens in whatever order, the invariants hold.

Workers claim, report, end, die and come back with old claims; users submit and cancel; the reaper and the dispatcher
run in between. Steps are real calls on a real Postgres.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings, strategies
from sqlalchemy import select, text
from tests.support.store import eval_job, publish_checkpoint, register, train_job

from tevatron.core.contracts.jobs import (
    CLAIMED_STATES,
    FINAL_STATES,
    EventType,
    FailReason,
    JobKind,
    JobState,
    Phase,
)
from tevatron.core.errors import ConflictError
from tevatron.core.store.claims import (
    append_events,
    claim_next_job,
    fail,
    finish_cancelled,
    heartbeat,
    release,
    succeed,
)
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.leases import LeaseLostError
from tevatron.core.store.lifecycle import NEXT, NewEvent, move
from tevatron.core.store.models import Job, JobEventRow
from tevatron.core.store.outbox import due_jobs, mark_published, reap, settle_waiting

MAX_ATTEMPTS = 3
INITIAL = {JobState.WAITING, JobState.QUEUED}
ACTIONS = [
    "submit",
    "claim",
    "beat",
    "phase",
    "succeed",
    "fail",
    "finish_cancelled",
    "release",
    "cancel",
    "resume",
    "save",
    "stop",
    "die",
    "reap",
    "settle",
    "publish",
]


class World:
    """Everything that may happen to the jobs, and what must be true after each of it."""

    def __init__(self, sessions):
        self.sessions = sessions
        self.claims = []
        self.final = {}
        self.num_succeeded = {}
        with sessions.begin() as session:
            session.execute(text("TRUNCATE api_keys, jobs, models, datasets CASCADE"))
            register(session)

    def act(self, action, pick):
        with self.sessions.begin() as session:
            try:
                getattr(self, action)(session, pick)
            except (LeaseLostError, ConflictError):
                session.rollback()
        self.check()

    def submit(self, session, pick):
        specs = {"tune": train_job()}
        if pick % 2:
            specs["check"] = eval_job(rerank={"checkpoint": {"from": "tune"}})
        JobRepository(session).submit(specs, key_id=None)

    def claim(self, session, pick):
        claim = claim_next_job(session, list(JobKind), worker=f"w{pick}", lease_s=60.0)
        if claim is not None:
            assert claim.attempt == claim.fence
            self.claims.append(claim)

    def _held(self, pick):
        return self.claims[pick % len(self.claims)]

    def beat(self, session, pick):
        if self.claims:
            heartbeat(session, self._held(pick), 60.0)

    def phase(self, session, pick):
        if self.claims:
            phase = list(Phase)[pick % len(Phase)]
            event = NewEvent(EventType.PHASE, {"phase": phase.value})
            append_events(session, self._held(pick), [event])

    def succeed(self, session, pick):
        if self.claims:
            claim = self._held(pick)
            if succeed(session, claim, {"attempt": claim.attempt}):
                # The unique job_id of a checkpoint would refuse a second one.
                publish_checkpoint(session, claim.job_id)
                self.num_succeeded[claim.job_id] = self.num_succeeded.get(claim.job_id, 0) + 1

    def fail(self, session, pick):
        if self.claims:
            fail(session, self._held(pick), reason=FailReason.DATA_ERROR, message="x")

    def finish_cancelled(self, session, pick):
        if self.claims:
            finish_cancelled(session, self._held(pick))

    def release(self, session, pick):
        if self.claims:
            release(session, self._held(pick))

    def cancel(self, session, pick):
        jobs = session.scalars(select(Job.id).order_by(Job.id)).all()
        if jobs:
            JobRepository(session).request_cancel(jobs[pick % len(jobs)], key_id=None)

    def resume(self, session, pick):
        jobs = session.scalars(select(Job.id).order_by(Job.id)).all()
        if jobs:
            JobRepository(session).resume(jobs[pick % len(jobs)], key_id=None)
            # Those that had failed for it go on as well.
            self.final = {
                job.id: self.final[job.id]
                for job in session.scalars(select(Job))
                if job.id in self.final and job.state in FINAL_STATES
            }

    def save(self, session, pick):
        jobs = session.scalars(select(Job.id).order_by(Job.id)).all()
        if jobs:
            JobRepository(session).request_save(jobs[pick % len(jobs)], key_id=None)

    def stop(self, session, pick):
        jobs = session.scalars(select(Job.id).order_by(Job.id)).all()
        if jobs:
            JobRepository(session).request_stop(jobs[pick % len(jobs)], key_id=None)

    def die(self, session, pick):
        if self.claims:
            session.execute(
                text(
                    "UPDATE jobs SET lease_until = now() - interval '1 hour' WHERE id = :id AND lease_until IS NOT NULL"
                ),
                {"id": self._held(pick).job_id},
            )

    def reap(self, session, pick):
        reap(session, grace_s=1.0, max_attempts=MAX_ATTEMPTS)

    def settle(self, session, pick):
        settle_waiting(session)

    def publish(self, session, pick):
        due = due_jobs(session, 15.0)
        mark_published(session, [one.job_id for one in due[: pick % 3]])

    def check(self):
        with self.sessions() as session:
            for job in session.scalars(select(Job)):
                self._check_row(job)
                events = session.scalars(
                    select(JobEventRow)
                    .where(JobEventRow.job_id == job.id)
                    .order_by(JobEventRow.seq)
                ).all()
                self._check_history(job, events)

    def _check_row(self, job):
        assert (job.lease_until is not None) == (job.state in CLAIMED_STATES)
        assert (job.finished_at is not None) == (job.state in FINAL_STATES)
        assert (job.reason is not None) == (job.state is JobState.FAILED)
        assert job.save_requested_at is None or job.state not in INITIAL
        assert job.lost_attempts <= min(job.attempt, MAX_ATTEMPTS)
        assert self.num_succeeded.get(job.id, 0) == (job.state is JobState.SUCCEEDED)
        if job.state in FINAL_STATES:
            seen = (job.state, job.last_seq, job.reason, job.result, job.attempt)
            assert self.final.setdefault(job.id, seen) == seen

    def _check_history(self, job, events):
        assert [event.seq for event in events] == list(range(1, job.last_seq + 1))
        told = [JobState(event.data["state"]) for event in events if event.type == "state"]
        assert told[0] in INITIAL
        assert told[-1] is job.state
        for before, after in pairwise(told):
            assert after in NEXT[before]


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=strategies.lists(
        strategies.tuples(strategies.sampled_from(ACTIONS), strategies.integers(0, 7)),
        min_size=5,
        max_size=40,
    )
)
def test_the_invariants_hold_whatever_happens(sessions, steps):
    world = World(sessions)
    world.act("submit", 1)
    for action, pick in steps:
        world.act(action, pick)


def test_only_a_resume_follows_a_final_state():
    assert NEXT[JobState.SUCCEEDED] == frozenset()
    for state in FINAL_STATES - {JobState.SUCCEEDED}:
        assert NEXT[state] == INITIAL


@pytest.mark.parametrize(
    ("before", "after"),
    [("queued", "running"), ("cancelling", "succeeded"), ("running", "starting")],
)
def test_a_step_that_is_not_in_the_table_is_refused(sessions, before, after):
    job = Job(id="job_1", state=JobState(before))
    with sessions() as session, pytest.raises(ConflictError) as caught:
        move(session, job, JobState(after))
    assert str(caught.value) == f"job job_1 is {before}; it cannot become {after}"
