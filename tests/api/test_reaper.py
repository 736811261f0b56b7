from __future__ import annotations

import threading
import time

from tests.support.store import job, states, submit, train_job

from tevatron.api.reaper import Reaper
from tevatron.core.contracts.jobs import JobKind, JobState
from tevatron.core.store.claims import claim_next_job
from tevatron.core.store.nudges import NudgeListener


def make_reaper(sessions, *, max_attempts: int = 3) -> Reaper:
    return Reaper(
        sessions, grace_s=0.2, max_attempts=max_attempts, poll_s=0.1, stopping=threading.Event()
    )


def lose(sessions) -> None:
    with sessions.begin() as session:
        assert claim_next_job(session, [JobKind.TRAIN], worker="dead", lease_s=0.05) is not None
    time.sleep(0.4)


def test_a_lost_job_is_queued_again_and_the_dispatcher_is_nudged(sessions, engine):
    [job_id] = submit(sessions, a=train_job())
    lose(sessions)
    listener = NudgeListener(engine)
    try:
        assert listener.wait(0.01) is False
        make_reaper(sessions).step()
        assert listener.wait(5.0) is True
    finally:
        listener.close()
    found = job(sessions, job_id)
    assert (found.state, found.published_at, found.lost_attempts) == (JobState.QUEUED, None, 1)
    assert states(sessions, job_id) == ["queued", "starting", "queued"]


def test_a_lease_that_holds_is_left_alone(sessions):
    [job_id] = submit(sessions, a=train_job())
    with sessions.begin() as session:
        claim_next_job(session, [JobKind.TRAIN], worker="alive", lease_s=60.0)
    make_reaper(sessions).step()
    assert job(sessions, job_id).state is JobState.STARTING


def test_a_job_that_loses_every_worker_fails(sessions):
    [job_id] = submit(sessions, a=train_job())
    for _ in range(2):
        lose(sessions)
        make_reaper(sessions, max_attempts=2).step()
    found = job(sessions, job_id)
    assert (found.state, found.reason) == (JobState.FAILED, "worker_lost")
