"""The worker's side of a job: each is claimed once, writes are fenced, ends are final and repeatable."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from pydantic import ValidationError
from sqlalchemy import text
from tests.support.store import eval_job, job, states, submit, train_job

from tevatron.core.contracts.jobs import EventType, FailReason, JobKind, Phase
from tevatron.core.errors import ConflictError
from tevatron.core.store.claims import (
    CancelRequestedError,
    append_events,
    claim_next_job,
    fail,
    finish_cancelled,
    heartbeat,
    look,
    release,
    succeed,
)
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.leases import LeaseLostError
from tevatron.core.store.lifecycle import NewEvent
from tevatron.core.store.outbox import reap


def claim(sessions, *kinds, worker="w1", lease_s=60.0):
    with sessions.begin() as session:
        return claim_next_job(session, kinds or list(JobKind), worker=worker, lease_s=lease_s)


def end_lease(sessions):
    with sessions.begin() as session:
        session.execute(text("UPDATE jobs SET lease_until = now() - interval '1 hour'"))


def cancel(sessions, job_id):
    with sessions.begin() as session:
        return JobRepository(session).request_cancel(job_id, key_id=None).state


def do(sessions, function, *args, **kwargs):
    with sessions.begin() as session:
        return function(session, *args, **kwargs)


def phase(value):
    return NewEvent(EventType.PHASE, {"phase": value.value})


def test_a_claim_starts_the_next_attempt_with_the_resolved_spec(sessions):
    [job_id] = submit(sessions, a=eval_job())
    held = claim(sessions, JobKind.EVAL)
    assert (held.job_id, held.kind, held.name, held.attempt, held.fence) == (
        job_id,
        "eval",
        "a",
        1,
        1,
    )
    assert held.spec.dataset.startswith("ds_")
    row = job(sessions, job_id)
    assert (row.state, row.holder, row.attempt) == ("starting", "w1", 1)
    assert row.started_at is not None
    assert row.spec["dataset"] == "corpus"


def test_the_highest_priority_is_claimed_first_and_the_oldest_of_one(sessions):
    low, plain, high, higher = submit(
        sessions,
        low=eval_job(priority=-1),
        plain=eval_job(),
        high=eval_job(priority=3),
        higher=eval_job(priority=3),
    )
    with sessions() as session:
        ahead = JobRepository(session).num_ahead([low, plain, high, higher])
    assert ahead == {high: 0, higher: 1, plain: 2, low: 3}
    taken = [claim(sessions, JobKind.EVAL).job_id for _ in range(4)]
    assert taken == [high, higher, plain, low]


def test_a_priority_is_a_small_number():
    for wrong in (11, -11, 1.5, "3"):
        with pytest.raises(ValidationError):
            eval_job(priority=wrong)


def test_a_claim_takes_only_its_kinds_and_the_oldest_first(sessions):
    first, second, third = submit(sessions, a=train_job(), b=eval_job(), c=eval_job())
    assert claim(sessions, JobKind.EVAL).job_id == second
    assert claim(sessions, JobKind.EVAL).job_id == third
    assert claim(sessions, JobKind.EVAL) is None
    assert claim(sessions, JobKind.EXPORT, JobKind.TRAIN).job_id == first


def test_fifty_jobs_and_eight_claimers_at_once_make_fifty_claims(sessions):
    ids = submit(sessions, **{f"j{number}": eval_job() for number in range(50)})
    claimed = Counter()
    start = threading.Barrier(8)

    def work():
        start.wait()
        while (held := claim(sessions)) is not None:
            claimed[held.job_id] += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert claimed == Counter(ids)


def test_a_spec_that_this_build_cannot_read_fails_and_blocks_nobody(sessions):
    broken, whole = submit(sessions, a=eval_job(), b=eval_job())
    with sessions.begin() as session:
        session.execute(
            text('UPDATE jobs SET resolved = \'{"kind": "eval", "version": 2}\' WHERE id = :id'),
            {"id": broken},
        )
    assert claim(sessions).job_id == whole
    row = job(sessions, broken)
    assert (row.state, row.reason) == ("failed", "config_error")
    assert "this build cannot read the job's spec" in row.message


def test_the_whole_life_leaves_its_events(sessions):
    [job_id] = submit(sessions, a=train_job())
    held = claim(sessions)
    do(sessions, append_events, held, [phase(Phase.PREPARING), phase(Phase.LOADING)])
    assert job(sessions, job_id).state == "starting"
    progress = NewEvent(EventType.PROGRESS, {"done": 1})
    do(sessions, append_events, held, [phase(Phase.TRAINING), progress, phase(Phase.SAVING)])
    row = job(sessions, job_id)
    assert (row.state, row.phase) == ("running", "saving")
    assert do(sessions, succeed, held, {"steps": 3}) is True
    row = job(sessions, job_id)
    assert (row.state, row.result, row.reason) == ("succeeded", {"steps": 3}, None)
    assert row.finished_at >= row.started_at
    assert row.lease_until is None
    assert states(sessions, job_id) == ["queued", "starting", "running", "succeeded"]
    with sessions() as session:
        events = JobRepository(session).events_page(job_id)
    assert [(event.seq, event.type, event.attempt) for event in events] == [
        (1, "state", 0),
        (2, "state", 1),
        (3, "phase", 1),
        (4, "phase", 1),
        (5, "state", 1),
        (6, "phase", 1),
        (7, "progress", 1),
        (8, "phase", 1),
        (9, "state", 1),
    ]


def test_a_failure_keeps_reason_phase_and_message(sessions):
    [job_id] = submit(sessions, a=train_job())
    held = claim(sessions)
    do(sessions, append_events, held, [phase(Phase.TRAINING)])
    do(sessions, fail, held, reason=FailReason.OUT_OF_MEMORY, message="no\0 memory \udcff")
    row = job(sessions, job_id)
    assert (row.state, row.reason, row.phase) == ("failed", "out_of_memory", "training")
    assert row.message == "no\N{REPLACEMENT CHARACTER} memory ?"
    with sessions() as session:
        last = JobRepository(session).events_page(job_id)[-1]
    assert last.data == {
        "state": "failed",
        "reason": "out_of_memory",
        "phase": "training",
        "message": "no\N{REPLACEMENT CHARACTER} memory ?",
    }


def test_numbers_that_json_does_not_have_are_stored_as_text(sessions):
    [job_id] = submit(sessions, a=train_job())
    held = claim(sessions)
    values = {"loss": float("nan"), "norms": [float("inf"), 1.5], "deep": {"x": float("-inf")}}
    do(sessions, append_events, held, [NewEvent(EventType.METRICS, values)])
    with sessions() as session:
        last = JobRepository(session).events_page(job_id)[-1]
    assert last.data == {"loss": "nan", "norms": ["inf", 1.5], "deep": {"x": "-inf"}}


def test_a_heartbeat_renews_the_lease(sessions):
    [job_id] = submit(sessions, a=train_job())
    held = claim(sessions, lease_s=5)
    before = job(sessions, job_id).lease_until
    assert do(sessions, heartbeat, held, 60.0).cancel_requested is False
    assert (job(sessions, job_id).lease_until - before).total_seconds() == pytest.approx(55, abs=4)


@pytest.mark.parametrize(
    "write",
    [
        lambda session, held: heartbeat(session, held, 60.0),
        look,
        lambda session, held: append_events(session, held, [phase(Phase.TRAINING)]),
        lambda session, held: succeed(session, held, {}),
        lambda session, held: fail(session, held, reason=FailReason.DATA_ERROR, message="x"),
        finish_cancelled,
        release,
    ],
    ids=["heartbeat", "look", "append_events", "succeed", "fail", "finish_cancelled", "release"],
)
def test_a_stale_claim_cannot_write(sessions, write):
    [job_id] = submit(sessions, a=train_job())
    stale = claim(sessions)
    end_lease(sessions)
    do(sessions, reap, grace_s=0.0, max_attempts=5)
    fresh = claim(sessions, worker="w2")
    assert (fresh.attempt, fresh.fence) == (2, 2)
    with pytest.raises(LeaseLostError, match="not held under fence 1 any more"):
        do(sessions, write, stale)
    row = job(sessions, job_id)
    assert (row.state, row.holder, row.last_seq) == ("starting", "w2", 4)


def test_a_claim_whose_job_was_only_requeued_cannot_write_either(sessions):
    [job_id] = submit(sessions, a=train_job())
    stale = claim(sessions)
    end_lease(sessions)
    do(sessions, reap, grace_s=0.0, max_attempts=5)
    with pytest.raises(LeaseLostError):
        do(sessions, succeed, stale, {})
    assert job(sessions, job_id).state == "queued"


def test_a_lapsed_lease_that_nobody_took_back_may_still_end(sessions):
    [job_id] = submit(sessions, a=train_job())
    held = claim(sessions)
    end_lease(sessions)
    assert do(sessions, succeed, held, {}) is True
    assert job(sessions, job_id).state == "succeeded"


def test_an_end_whose_answer_was_lost_may_be_repeated(sessions):
    first, second, third = submit(sessions, a=train_job(), b=train_job(), c=train_job())
    held = claim(sessions)
    assert do(sessions, succeed, held, {"a": 1}) is True
    assert do(sessions, succeed, held, {"a": 2}) is False
    assert job(sessions, first).result == {"a": 1}
    held = claim(sessions)
    for message in ("once", "twice"):
        do(sessions, fail, held, reason=FailReason.DATA_ERROR, message=message)
    assert job(sessions, second).message == "once"
    held = claim(sessions)
    do(sessions, release, held)
    do(sessions, release, held)
    assert states(sessions, third) == ["queued", "starting", "queued"]


def test_a_batch_of_events_in_doubt_is_stored_once(sessions):
    [job_id] = submit(sessions, a=train_job())
    held = claim(sessions)
    batch = [
        NewEvent(EventType.LOG, {"message": "one"}),
        NewEvent(EventType.LOG, {"message": "two"}),
    ]
    do(sessions, append_events, held, batch)
    do(sessions, append_events, held, batch, in_doubt=True)
    assert job(sessions, job_id).last_seq == 4
    other = [NewEvent(EventType.LOG, {"message": "three"})]
    do(sessions, append_events, held, other, in_doubt=True)
    assert job(sessions, job_id).last_seq == 5


def test_a_final_state_is_final(sessions):
    [job_id] = submit(sessions, a=train_job())
    held = claim(sessions)
    do(sessions, succeed, held, {})
    with pytest.raises(LeaseLostError):
        do(sessions, fail, held, reason=FailReason.DATA_ERROR, message="too late")
    with pytest.raises(ConflictError, match="is succeeded; it cannot be cancelled any more"):
        cancel(sessions, job_id)
    end_lease(sessions)
    do(sessions, reap, grace_s=0.0, max_attempts=1)
    assert job(sessions, job_id).state == "succeeded"


def test_release_gives_the_job_to_the_next_worker_without_counting_a_loss(sessions):
    [job_id] = submit(sessions, a=train_job())
    for attempt in range(1, 10):
        held = claim(sessions)
        assert held.attempt == attempt
        do(sessions, release, held)
    row = job(sessions, job_id)
    assert (row.state, row.lost_attempts, row.phase, row.published_at) == ("queued", 0, None, None)


def test_cancel_of_a_queued_job_is_immediate_and_it_is_never_claimed(sessions):
    [job_id] = submit(sessions, a=train_job())
    assert cancel(sessions, job_id) == "cancelled"
    assert cancel(sessions, job_id) == "cancelled"
    assert claim(sessions) is None
    assert states(sessions, job_id) == ["queued", "cancelled"]


@pytest.mark.parametrize("entered", [Phase.PREPARING, Phase.SAVING])
def test_cancel_of_a_claimed_job_waits_for_its_worker(sessions, entered):
    [job_id] = submit(sessions, a=train_job())
    held = claim(sessions)
    do(sessions, append_events, held, [phase(entered)])
    assert cancel(sessions, job_id) == "cancelling"
    assert cancel(sessions, job_id) == "cancelling"
    assert do(sessions, look, held).cancel_requested is True
    assert do(sessions, heartbeat, held, 60.0).cancel_requested is True
    assert job(sessions, job_id).cancel_requested_at is not None
    do(sessions, finish_cancelled, held)
    do(sessions, finish_cancelled, held)
    assert states(sessions, job_id)[-2:] == ["cancelling", "cancelled"]


def test_a_cancelled_job_cannot_succeed_any_more(sessions):
    [job_id] = submit(sessions, a=train_job())
    held = claim(sessions)
    cancel(sessions, job_id)
    with pytest.raises(CancelRequestedError):
        do(sessions, succeed, held, {})
    assert job(sessions, job_id).state == "cancelling"


@pytest.mark.parametrize("end", ["fail", "release"])
def test_a_cancelled_job_that_fails_or_is_released_is_cancelled(sessions, end):
    [job_id] = submit(sessions, a=train_job())
    held = claim(sessions)
    cancel(sessions, job_id)
    if end == "fail":
        do(sessions, fail, held, reason=FailReason.PROGRAM_FAILED, message="exit -15")
    else:
        do(sessions, release, held)
    row = job(sessions, job_id)
    assert (row.state, row.reason) == ("cancelled", None)
    assert claim(sessions) is None


def test_a_running_job_is_not_cancelled_without_a_request(sessions):
    [job_id] = submit(sessions, a=train_job())
    held = claim(sessions)
    with pytest.raises(ConflictError, match="is starting; it cannot become cancelled"):
        do(sessions, finish_cancelled, held)
    assert job(sessions, job_id).state == "starting"
