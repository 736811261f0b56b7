"""A real worker process on a real Valkey: every job once, SIGTERM at once, kill -9, lost messages, a lost broker."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack, contextmanager

import pytest
from pydantic import SecretStr
from sqlalchemy import func, select, text
from tests.core.store.test_claims import cancel, do, end_lease
from tests.support.processes import python, running, settings_environment, wait_for
from tests.support.store import eval_job, job, states, submit
from tests.support.worker_process import RAN

from tevatron.core.cli.stack.valkey import EmbeddedValkey
from tevatron.core.contracts.jobs import JobKind
from tevatron.core.store.models import Job
from tevatron.core.store.outbox import due_jobs, mark_published, reap
from tevatron.core.worker.celery_app import make_celery, num_messages, publish

START_S = 60.0
WORKER = python("-m", "tests.support.worker_process")


@pytest.fixture
def celery(settings):
    app = make_celery(settings, producer=True)
    yield app
    app.close()


@pytest.fixture
def log(tmp_path):
    return tmp_path / "worker.log"


@contextmanager
def reaping(sessions):
    """What the reaper does, with the lease of the tests and no grace."""
    stop = threading.Event()

    def work():
        while not stop.wait(0.2):
            do(sessions, reap, grace_s=0.0, max_attempts=3)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def ran(settings):
    path = settings.data / RAN
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def wake(celery, *ids):
    for job_id in ids:
        publish(celery, JobKind.EVAL, job_id=job_id)


def wait_for_state(sessions, job_id, state, timeout_s=START_S):
    wait_for(lambda: job(sessions, job_id).state == state, timeout_s=timeout_s, what=state)


def num_in_state(sessions, state):
    with sessions() as session:
        return session.scalar(select(func.count()).select_from(Job).where(Job.state == state))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_fifty_jobs_with_doubled_wake_ups_run_once_each(
    settings, sessions, celery, environment, log, num_workers
):
    ids = submit(sessions, **{f"quick{number}": eval_job() for number in range(50)})
    wake(celery, *ids, *ids)
    with ExitStack() as stack:
        for _ in range(num_workers):
            stack.enter_context(running(WORKER, environment=environment, log=log))
        wait_for(lambda: num_in_state(sessions, "succeeded") == 50, timeout_s=90, what="50 jobs")
        wait_for(lambda: num_messages(celery, "eval") == 0, timeout_s=90, what="an empty queue")
        time.sleep(0.5)
        assert Counter(job_id for job_id, _, _ in ran(settings)) == Counter(ids)
    for job_id in ids:
        assert states(sessions, job_id) == ["queued", "starting", "running", "succeeded"]


def test_one_wake_up_is_enough_for_all_queued_jobs(settings, sessions, celery, environment, log):
    ids = submit(sessions, quick1=eval_job(), fail2=eval_job(), quick3=eval_job())
    wake(celery, ids[2])
    with running(WORKER, environment=environment, log=log):
        wait_for_state(sessions, ids[2], "succeeded")
    assert [one for one, _, _ in ran(settings)] == ids
    assert (job(sessions, ids[1]).state, job(sessions, ids[1]).message) == (
        "failed",
        "told to fail",
    )


def test_the_log_says_what_a_worker_waits_for_and_how_each_attempt_goes(
    settings, sessions, celery, environment, log
):
    quick, fail, long = submit(sessions, quick=eval_job(), fail=eval_job(), long=eval_job())
    wake(celery, quick)
    with running(WORKER, environment=environment, log=log):
        wait_for_state(sessions, long, "running")
        cancel(sessions, long)
        wait_for(lambda: "stopped" in log.read_text(), timeout_s=15)
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    said = [
        (line["level"], line.get("job_id"), re.sub(r" after \d+ s$", "", line["message"]))
        for line in lines
    ]
    assert said == [
        ("info", None, "waiting for jobs: eval"),
        ("info", quick, f"job {quick}: attempt 1 starts"),
        ("info", quick, f"job {quick}: attempt 1 finished"),
        ("info", fail, f"job {fail}: attempt 1 starts"),
        ("warning", fail, f"job {fail} fails: config_error: told to fail"),
        ("info", fail, f"job {fail}: attempt 1 failed"),
        ("info", long, f"job {long}: attempt 1 starts"),
        ("info", long, f"job {long}: attempt 1 stopped (cancelled)"),
    ]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 1)])
def test_a_signal_stops_the_running_job_at_once_and_gives_it_back(
    settings, sessions, celery, environment, log, number, status
):
    long, next_one = submit(sessions, long=eval_job(), quick=eval_job())
    wake(celery, long, next_one)
    with running(WORKER, environment=environment, log=log) as worker:
        wait_for_state(sessions, long, "running")
        asked = time.monotonic()
        worker.send_signal(number)
        wait_for_state(sessions, long, "queued", timeout_s=15)
        assert worker.wait(timeout=30) == status
        assert time.monotonic() - asked < 30
    row = job(sessions, long)
    assert (row.lost_attempts, row.message) == (0, "released: its worker shuts down")
    assert job(sessions, next_one).state == "queued"
    assert [name for _, _, name in ran(settings)] == ["long"]


def test_an_idle_worker_ends_on_sigterm(settings, sessions, celery, environment, log):
    [job_id] = submit(sessions, quick=eval_job())
    wake(celery, job_id)
    with running(WORKER, environment=environment, log=log) as worker:
        wait_for_state(sessions, job_id, "succeeded")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=30) == 0


def test_a_killed_workers_job_runs_again_in_the_next_worker(
    settings, sessions, celery, environment, log
):
    [job_id] = submit(sessions, long=eval_job())
    wake(celery, job_id)
    with reaping(sessions):
        with running(WORKER, environment=environment, log=log) as worker:
            wait_for_state(sessions, job_id, "running")
            worker.send_signal(signal.SIGKILL)
            worker.wait()
        wait_for_state(sessions, job_id, "queued", timeout_s=settings.lease_s + 10)
        with sessions.begin() as session:
            session.execute(text("UPDATE jobs SET name = 'quick'"))
            [due] = due_jobs(session, 15.0)
            mark_published(session, [due.job_id])
        wake(celery, due.job_id)
        with running(WORKER, environment=environment, log=log):
            wait_for_state(sessions, job_id, "succeeded")
    row = job(sessions, job_id)
    assert (row.attempt, row.lost_attempts, row.result) == (2, 1, {"attempt": 2})
    assert states(sessions, job_id) == [
        "queued",
        "starting",
        "running",
        "queued",
        "starting",
        "running",
        "succeeded",
    ]


def test_a_cancelled_job_ends_and_the_worker_goes_on(settings, sessions, celery, environment, log):
    long, quick = submit(sessions, long=eval_job(), quick=eval_job())
    wake(celery, long, quick)
    with running(WORKER, environment=environment, log=log):
        wait_for_state(sessions, long, "running")
        cancel(sessions, long)
        wait_for_state(sessions, long, "cancelled", timeout_s=15)
        wait_for_state(sessions, quick, "succeeded")


def test_a_job_that_was_cancelled_while_no_worker_was_up_never_starts(
    settings, sessions, celery, environment, log
):
    gone, kept = submit(sessions, long=eval_job(), quick=eval_job())
    wake(celery, gone, kept)
    cancel(sessions, gone)
    with running(WORKER, environment=environment, log=log):
        wait_for_state(sessions, kept, "succeeded")
    assert [name for _, _, name in ran(settings)] == ["quick"]


def test_a_worker_that_lost_its_lease_leaves_the_job_to_the_other(
    settings, sessions, celery, environment, log
):
    [job_id] = submit(sessions, long=eval_job())
    wake(celery, job_id)
    with running(WORKER, environment=environment, log=log) as worker:
        wait_for_state(sessions, job_id, "running")
        worker.send_signal(signal.SIGSTOP)
        end_lease(sessions)
        do(sessions, reap, grace_s=0.0, max_attempts=3)
        assert job(sessions, job_id).state == "queued"
        with running(WORKER, environment=environment, log=log):
            wake(celery, job_id)
            wait_for_state(sessions, job_id, "running")
            worker.send_signal(signal.SIGCONT)
            wait_for(lambda: "not held under fence 1" in log.read_text(), timeout_s=15)
            assert (job(sessions, job_id).state, job(sessions, job_id).attempt) == ("running", 2)


@pytest.mark.parametrize("while_running", [True, False])
def test_a_worker_survives_a_broker_that_lost_everything(
    settings, sessions, log, tmp_path, while_running
):
    broker = EmbeddedValkey(tmp_path / "valkey")
    try:
        own = settings.model_copy(update={"broker_url": SecretStr(broker.start())})
        celery = make_celery(own, producer=True)
        first, second = submit(sessions, long=eval_job(), quick=eval_job())
        wake(celery, first)
        with running(WORKER, environment=_environment(own), log=log):
            wait_for_state(sessions, first, "running")
            if not while_running:
                cancel(sessions, first)
                wait_for_state(sessions, second, "succeeded")
            for _ in range(3):
                broker.stop()
                broker.start()
            if while_running:
                cancel(sessions, first)
                # The wake-up's own loop takes the next job, whatever the broker is doing.
                wait_for_state(sessions, second, "succeeded")
            [third] = submit(sessions, quick3=eval_job())
            _wake_until(celery, sessions, third, "succeeded")
        celery.close()
    finally:
        broker.stop()


def _environment(settings):
    return {**os.environ, **settings_environment(settings)}


def _wake_until(celery, sessions, job_id, state):
    """What the dispatcher does: publish again while the queue is empty."""

    def look():
        if num_messages(celery, "eval") == 0:
            publish(celery, JobKind.EVAL, job_id=job_id)
        return job(sessions, job_id).state == state

    wait_for(look, timeout_s=60, what=state)


def test_a_worker_refuses_a_schema_that_is_not_its_own(sessions, environment, log):
    with sessions.begin() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with running(WORKER, environment=environment, log=log) as worker:
        assert worker.wait(timeout=START_S) != 0
    assert "the database's schema is at revision 9999" in log.read_text()
