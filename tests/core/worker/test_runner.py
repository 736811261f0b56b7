"""One job's life in a worker, on a real Postgres: every end, and what happens when the database is away."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
from sqlalchemy import text
from tests.core.store.test_claims import cancel, do, end_lease
from tests.support.database import database_away
from tests.support.processes import wait_for
from tests.support.store import eval_job, job, publish_checkpoint, states, submit, train_job

from tevatron.core.contracts.jobs import JobKind, Phase
from tevatron.core.errors import (
    ConfigError,
    ContractError,
    FormatError,
    JobError,
    NotFoundError,
    PromptError,
    QueryTooLongError,
)
from tevatron.core.store.checkpoints import CheckpointRepository
from tevatron.core.store.claims import claim_next_job
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.outbox import reap
from tevatron.core.worker.runner import (
    AttemptLostError,
    Finished,
    Stopped,
    StopReason,
    run_next_job,
)


class Worker:
    """Runs one job with a handler, in the test's thread or beside it."""

    def __init__(self, settings, sessions):
        self.settings = settings
        self.sessions = sessions
        self.shutdown = False

    def run(self, handler):
        return run_next_job(
            [JobKind.TRAIN, JobKind.EVAL],
            handlers={JobKind.TRAIN: handler, JobKind.EVAL: handler},
            settings=self.settings,
            sessions=self.sessions,
            worker_name="w1",
            should_stop=lambda: self.shutdown,
        )

    @contextmanager
    def running(self, handler):
        thread = threading.Thread(target=self.run, args=(handler,))
        thread.start()
        try:
            yield
        finally:
            self.shutdown = self.shutdown or None
            thread.join(20)
            assert not thread.is_alive()


@pytest.fixture
def worker(settings, sessions):
    return Worker(settings, sessions)


def work_until_told(context, spec):
    context.phase(Phase.TRAINING)
    context.wait(15.0)
    context.check()
    raise AssertionError("nobody told the job to stop")


def wait_for_state(sessions, job_id, state):
    wait_for(lambda: job(sessions, job_id).state == state, timeout_s=10, what=state)


def events(sessions, job_id, kind):
    with sessions() as session:
        return [one.data for one in JobRepository(session).events_page(job_id) if one.type == kind]


def test_without_a_job_there_is_nothing_to_do(worker):
    assert worker.run(work_until_told) is False


def test_a_worker_that_shuts_down_claims_nothing(worker, sessions):
    [job_id] = submit(sessions, a=train_job())
    worker.shutdown = True
    assert worker.run(work_until_told) is False
    assert job(sessions, job_id).state == "queued"


def test_success_stores_the_result_the_rows_and_the_reports(worker, sessions):
    [job_id] = submit(sessions, a=train_job())

    def handler(context, spec):
        assert spec.model.startswith("model_")
        context.phase(Phase.LOADING)
        context.phase(Phase.TRAINING)
        context.metrics({"step": 1, "loss": float("nan")})
        context.progress(1, 4, "steps")
        context.progress(2, 4, "steps")
        context.log("warning", "a dead flag")
        return Finished(
            result={"steps": 4}, write=lambda session: publish_checkpoint(session, job_id)
        )

    assert worker.run(handler) is True
    row = job(sessions, job_id)
    assert (row.state, row.result, row.attempt) == ("succeeded", {"steps": 4}, 1)
    assert states(sessions, job_id) == ["queued", "starting", "running", "succeeded"]
    assert events(sessions, job_id, "phase") == [{"phase": "loading"}, {"phase": "training"}]
    assert events(sessions, job_id, "metrics") == [{"step": 1, "loss": "nan"}]
    assert events(sessions, job_id, "log") == [{"level": "warning", "message": "a dead flag"}]
    [progress] = events(sessions, job_id, "progress")
    assert (progress["done"], progress["total"], progress["unit"]) == (2, 4, "steps")
    assert progress["eta_s"] >= 0
    with sessions() as session:
        assert CheckpointRepository(session).of_job(job_id) is not None


@pytest.mark.parametrize(
    ("error", "reason", "message"),
    [
        (
            FormatError("expected a list", path="train.jsonl", line=17, field="positive_passages"),
            "data_error",
            "train.jsonl:17: field 'positive_passages': expected a list",
        ),
        (QueryTooLongError("query q1"), "data_error", "query q1"),
        (ConfigError("no such flag"), "config_error", "no such flag"),
        (PromptError("' yes' is two tokens"), "config_error", "' yes' is two tokens"),
        (ContractError("tokenizer"), "contract_mismatch", "tokenizer"),
        (NotFoundError("dataset 'ds_0' is gone"), "config_error", "dataset 'ds_0' is gone"),
        (JobError("CUDA", reason="out_of_memory", phase="saving"), "out_of_memory", "CUDA"),
        (JobError("x", reason="no such reason", phase="nor phase"), "internal_error", "x"),
        (KeyError("oops"), "internal_error", "KeyError: 'oops'"),
    ],
)
def test_an_error_ends_the_job_with_a_reason_and_a_message(
    worker, sessions, error, reason, message
):
    [job_id] = submit(sessions, a=train_job())

    def handler(context, spec):
        context.phase(Phase.TRAINING)
        raise error

    assert worker.run(handler) is True
    row = job(sessions, job_id)
    assert (row.state, row.reason, row.message) == ("failed", reason, message)
    assert row.phase == ("saving" if reason == "out_of_memory" else "training")


def test_rows_that_cannot_be_stored_fail_the_job_and_leave_nothing(worker, sessions):
    [job_id] = submit(sessions, a=train_job())

    def write(session):
        publish_checkpoint(session, job_id)
        session.execute(text("INSERT INTO evaluation_values VALUES ('none', 'm', 'q', 0.5)"))

    worker.run(lambda context, spec: Finished(result={}, write=write))
    row = job(sessions, job_id)
    assert (row.state, row.reason) == ("failed", "internal_error")
    assert "fk_evaluation_values" in row.message
    with sessions() as session:
        assert CheckpointRepository(session).of_job(job_id) is None


def test_an_attempt_that_was_killed_runs_again_until_the_limit(worker, sessions):
    [job_id] = submit(sessions, a=train_job())

    def handler(context, spec):
        raise AttemptLostError("rank 1 was killed")

    for _ in range(3):
        assert worker.run(handler) is True
    assert worker.run(handler) is False
    row = job(sessions, job_id)
    assert (row.state, row.reason, row.attempt) == ("failed", "worker_lost", 3)
    assert row.message.endswith("rank 1 was killed")


def test_cancel_reaches_the_handler_and_then_the_job_is_cancelled(worker, sessions):
    [job_id] = submit(sessions, a=train_job())
    with worker.running(work_until_told):
        wait_for_state(sessions, job_id, "running")
        asked = time.monotonic()
        assert cancel(sessions, job_id) == "cancelling"
        wait_for_state(sessions, job_id, "cancelled")
    assert time.monotonic() - asked < 3
    assert states(sessions, job_id)[-2:] == ["cancelling", "cancelled"]


def test_cancel_at_the_last_moment_discards_what_was_published(worker, sessions):
    [job_id] = submit(sessions, a=train_job())
    discarded = []

    def handler(context, spec):
        cancel(sessions, job_id)
        return Finished(
            result={},
            write=lambda session: publish_checkpoint(session, job_id),
            discard=lambda: discarded.append(job(sessions, job_id).state),
        )

    worker.run(handler)
    assert job(sessions, job_id).state == "cancelled"
    assert discarded == ["cancelling"]
    with sessions() as session:
        assert CheckpointRepository(session).of_job(job_id) is None


def test_a_handler_that_fails_because_it_was_cancelled_leaves_a_cancelled_job(worker, sessions):
    [job_id] = submit(sessions, a=train_job())

    def handler(context, spec):
        cancel(sessions, job_id)
        raise JobError("exit -15", reason="program_failed")

    worker.run(handler)
    assert (job(sessions, job_id).state, job(sessions, job_id).reason) == ("cancelled", None)


def test_shutdown_gives_the_job_back(worker, sessions):
    [job_id] = submit(sessions, a=train_job())
    with worker.running(work_until_told):
        wait_for_state(sessions, job_id, "running")
        worker.shutdown = True
        wait_for_state(sessions, job_id, "queued")
    row = job(sessions, job_id)
    assert (row.lost_attempts, row.holder, row.phase) == (0, None, None)
    worker.shutdown = False
    worker.run(lambda context, spec: Finished(result={"attempt": context.claim.attempt}))
    assert job(sessions, job_id).result == {"attempt": 2}


def test_a_program_that_dies_with_the_shutdown_is_no_failure(worker, sessions):
    [job_id] = submit(sessions, a=train_job())

    def handler(context, spec):
        worker.shutdown = True
        raise JobError("exit -2", reason="program_failed")

    worker.run(handler)
    assert job(sessions, job_id).state == "queued"


def test_a_mistake_in_the_data_stays_one_during_shutdown(worker, sessions):
    [job_id] = submit(sessions, a=train_job())

    def handler(context, spec):
        worker.shutdown = True
        raise FormatError("broken", path="x", line=1)

    worker.run(handler)
    assert job(sessions, job_id).reason == "data_error"


def test_a_cancel_during_shutdown_wins(worker, sessions):
    [job_id] = submit(sessions, a=train_job())
    seen = []

    def handler(context, spec):
        worker.shutdown = True
        seen.append(context.stop_reason)
        cancel(sessions, job_id)
        wait_for(lambda: context.stop_reason is StopReason.CANCELLED, timeout_s=5)
        raise Stopped(StopReason.CANCELLED)

    worker.run(handler)
    assert seen == [StopReason.SHUTDOWN]
    assert job(sessions, job_id).state == "cancelled"


@pytest.mark.parametrize("outcome", ["succeeds", "fails", "stops"])
def test_whoever_lost_the_lease_writes_nothing(worker, sessions, outcome):
    [job_id] = submit(sessions, a=train_job())
    discarded = []

    def handler(context, spec):
        context.phase(Phase.TRAINING)
        # In one transaction: a heartbeat in between would renew the lease.
        with sessions.begin() as session:
            session.execute(text("UPDATE jobs SET lease_until = now() - interval '1 hour'"))
            reap(session, grace_s=0.0, max_attempts=5)
            fresh = claim_next_job(session, list(JobKind), worker="w2", lease_s=60.0)
            assert fresh.attempt == 2
        wait_for(lambda: context.stop_reason, timeout_s=5)
        context.log("info", "a line of the past")
        if outcome == "succeeds":
            return Finished(
                result={},
                write=lambda session: publish_checkpoint(session, job_id),
                discard=lambda: discarded.append(1),
            )
        if outcome == "fails":
            raise ConfigError("x")
        context.check()
        raise AssertionError("not stopped")

    worker.run(handler)
    row = job(sessions, job_id)
    assert (row.state, row.holder, row.attempt) == ("starting", "w2", 2)
    assert events(sessions, job_id, "log") == []
    assert discarded == []
    with sessions() as session:
        assert CheckpointRepository(session).of_job(job_id) is None


def test_the_lease_is_renewed_while_the_handler_works(worker, sessions):
    [job_id] = submit(sessions, a=train_job())

    def handler(context, spec):
        assert context.wait(worker.settings.lease_s + 1.5) is None
        assert do(sessions, reap, grace_s=0.0, max_attempts=5).requeued == []
        return Finished(result={})

    worker.run(handler)
    assert (job(sessions, job_id).state, job(sessions, job_id).attempt) == ("succeeded", 1)


def test_reports_are_stored_within_two_seconds(worker, sessions):
    [job_id] = submit(sessions, a=train_job())

    def handler(context, spec):
        context.metrics({"step": 1})
        wait_for(lambda: events(sessions, job_id, "metrics"), timeout_s=2)
        return Finished(result={})

    worker.run(handler)
    assert job(sessions, job_id).state == "succeeded"


def test_a_report_that_cannot_be_stored_is_dropped_and_the_job_goes_on(worker, sessions):
    [job_id] = submit(sessions, a=train_job())

    def handler(context, spec):
        context.metrics({"step": 10**200})
        context.metrics({"x" * 10: "a\0b\udcff"})
        context.phase(Phase.TRAINING)
        return Finished(result={})

    worker.run(handler)
    assert job(sessions, job_id).state == "succeeded"


def test_a_database_that_is_away_for_less_than_the_lease_does_no_harm(
    worker, sessions, database_url
):
    [job_id] = submit(sessions, a=train_job())

    def handler(context, spec):
        context.phase(Phase.TRAINING)
        with database_away(database_url):
            context.metrics({"step": 1})
            context.phase(Phase.SAVING)
            assert context.wait(1.5) is None
            context.metrics({"step": 2})
        assert context.wait(1.0) is None
        name = context.in_transaction(lambda session: JobRepository(session).by_id(job_id).name)
        return Finished(result={"name": name})

    worker.run(handler)
    row = job(sessions, job_id)
    assert (row.state, row.result, row.attempt) == ("succeeded", {"name": "a"}, 1)
    assert events(sessions, job_id, "metrics") == [{"step": 1}, {"step": 2}]
    assert events(sessions, job_id, "phase") == [{"phase": "training"}, {"phase": "saving"}]


def test_an_end_is_stored_once_the_database_answers_again(worker, sessions, database_url):
    [job_id] = submit(sessions, a=train_job())
    away = database_away(database_url)

    def handler(context, spec):
        away.__enter__()
        threading.Timer(1.5, away.__exit__, (None, None, None)).start()
        return Finished(result={"a": 1}, write=lambda session: publish_checkpoint(session, job_id))

    worker.run(handler)
    assert (job(sessions, job_id).state, job(sessions, job_id).result) == ("succeeded", {"a": 1})


def test_a_database_that_is_away_for_longer_stops_the_job(worker, sessions, database_url):
    [job_id] = submit(sessions, a=train_job())
    began = time.monotonic()
    waited = []

    def handler(context, spec):
        with database_away(database_url):
            assert context.wait(20.0) is StopReason.LEASE_LOST
            waited.append(time.monotonic() - began)
        context.check()

    worker.run(handler)
    assert 4.0 < waited[0] < 12.0
    assert job(sessions, job_id).state == "starting"
    end_lease(sessions)
    do(sessions, reap, grace_s=0.0, max_attempts=5)
    assert job(sessions, job_id).state == "queued"


def test_a_handler_that_met_the_silent_database_runs_again(worker, sessions, database_url):
    [job_id] = submit(sessions, a=eval_job())
    away = database_away(database_url)

    def handler(context, spec):
        away.__enter__()
        threading.Timer(1.0, away.__exit__, (None, None, None)).start()
        with context.sessions.begin() as session:
            session.execute(text("SELECT 1"))

    worker.run(handler)
    row = job(sessions, job_id)
    assert (row.state, row.lost_attempts) == ("queued", 1)


def test_a_heartbeat_that_hangs_stops_the_job_when_the_lease_is_over(worker, sessions):
    [job_id] = submit(sessions, a=train_job())

    def handler(context, spec):
        with sessions.begin() as session:
            session.execute(text("SELECT 1 FROM jobs FOR UPDATE"))
            assert context.wait(20.0) is StopReason.LEASE_LOST
        context.check()

    worker.run(handler)
    assert job(sessions, job_id).state == "starting"
