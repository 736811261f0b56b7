"""The dispatcher's steps on a real database and a real broker."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from tests.support.store import eval_job, job, publish_checkpoint, submit, train_job

from tevatron.api.dispatcher import Dispatcher
from tevatron.core.cli.stack.valkey import EmbeddedValkey
from tevatron.core.contracts.jobs import FailReason, From, JobKind, JobState, Rerank
from tevatron.core.errors import UnavailableError
from tevatron.core.settings import Settings
from tevatron.core.store.claims import claim_next_job, fail, succeed
from tevatron.core.store.nudges import NudgeListener, nudge
from tevatron.core.worker.celery_app import make_celery, num_messages

REPUBLISH_S = 0.5


@pytest.fixture
def celery(settings: Settings):
    with make_celery(settings, producer=True) as app:
        yield app


@pytest.fixture
def listener(engine) -> Iterator[NudgeListener]:
    listener = NudgeListener(engine)
    yield listener
    listener.close()


@pytest.fixture
def dispatcher(sessions, celery, listener) -> Dispatcher:
    return Dispatcher(sessions, celery, listener, republish_s=REPUBLISH_S, poll_s=5.0)


def test_each_queued_job_is_sent_once(dispatcher, celery, sessions):
    submit(sessions, a=train_job(), b=train_job(), c=eval_job())
    for _ in range(3):
        dispatcher.step()
    assert num_messages(celery, "train") == 2
    assert num_messages(celery, "eval") == 1


def test_more_jobs_than_one_batch_are_all_sent(dispatcher, celery, sessions):
    submit(sessions, **{f"job{number}": eval_job() for number in range(230)})
    dispatcher.step()
    assert num_messages(celery, "eval") == 230


def test_wake_ups_do_not_pile_up_behind_a_long_job(dispatcher, celery, sessions):
    submit(sessions, a=train_job())
    dispatcher.step()
    for _ in range(3):
        time.sleep(REPUBLISH_S + 0.1)
        dispatcher.step()
    assert num_messages(celery, "train") == 1


def test_a_broker_that_lost_its_data_gets_the_wake_up_again(dispatcher, celery, sessions):
    submit(sessions, a=train_job(), b=train_job())
    dispatcher.step()
    with celery.connection_for_write() as connection:
        connection.default_channel.client.flushall()
    dispatcher.step()
    assert num_messages(celery, "train") == 0
    time.sleep(REPUBLISH_S + 0.1)
    dispatcher.step()
    assert num_messages(celery, "train") >= 1


def test_a_waiting_job_is_sent_when_its_source_has_succeeded(dispatcher, celery, sessions):
    rerank = Rerank(checkpoint=From(source="tune"))
    tune, table = submit(sessions, tune=train_job(), table=eval_job(rerank=rerank))
    dispatcher.step()
    assert (job(sessions, table).state, num_messages(celery, "eval")) == (JobState.WAITING, 0)
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60)
        assert claim is not None
        checkpoint = publish_checkpoint(session, tune)
        succeed(session, claim, {"checkpoint_id": checkpoint})
    dispatcher.step()
    assert (job(sessions, table).state, num_messages(celery, "eval")) == (JobState.QUEUED, 1)
    assert job(sessions, table).resolved["rerank"]["checkpoint"] == checkpoint


def test_a_waiting_job_fails_with_its_source(dispatcher, celery, sessions):
    rerank = Rerank(checkpoint=From(source="tune"))
    _, table = submit(sessions, tune=train_job(), table=eval_job(rerank=rerank))
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60)
        assert claim is not None
        fail(session, claim, reason=FailReason.DATA_ERROR, message="line 17")
    dispatcher.step()
    found = job(sessions, table)
    assert (found.state, found.reason) == (JobState.FAILED, FailReason.DEPENDENCY_FAILED)
    assert num_messages(celery, "eval") == 0


def test_what_a_dead_broker_did_not_take_is_sent_once_it_is_back(settings, sessions, listener):
    with tempfile.TemporaryDirectory(prefix="tevatron-test-") as folder:
        broker = EmbeddedValkey(Path(folder))
        url = broker.start()
        settings = settings.model_copy(update={"broker_url": SecretStr(url)})
        try:
            with make_celery(settings, producer=True) as celery:
                dispatcher = Dispatcher(sessions, celery, listener, republish_s=600.0, poll_s=5.0)
                submit(sessions, a=train_job())
                dispatcher.step()
                broker.stop()
                submit(sessions, b=train_job())
                for _ in range(2):
                    with pytest.raises(UnavailableError):
                        dispatcher.step()
                broker.start()
                dispatcher.step()
                assert num_messages(celery, "train") == 1
        finally:
            broker.stop()


def test_a_nudge_ends_the_pause(dispatcher, sessions):
    dispatcher.step()
    started = time.monotonic()

    def send() -> None:
        time.sleep(0.5)
        with sessions.begin() as session:
            nudge(session)

    sender = threading.Thread(target=send)
    sender.start()
    dispatcher.pause()
    sender.join()
    assert time.monotonic() - started < 4.0


def test_a_job_that_ends_nudges_for_those_that_wait_for_it(sessions, listener):
    fit, _ = submit(
        sessions, fit=train_job(), table=eval_job(rerank={"checkpoint": {"from": "fit"}})
    )
    assert listener.wait(0.01) is False
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
        assert claim is not None
        assert claim.job_id == fit
    assert listener.wait(0.01) is False
    with sessions.begin() as session:
        fail(session, claim, reason=FailReason.DATA_ERROR, message="line 17")
    assert listener.wait(5.0) is True


def test_without_a_nudge_the_pause_ends_by_itself(sessions, celery, listener):
    dispatcher = Dispatcher(sessions, celery, listener, republish_s=600.0, poll_s=0.2)
    started = time.monotonic()
    dispatcher.pause()
    assert 0.15 < time.monotonic() - started < 4.0


def test_the_listener_connects_again(engine, listener, sessions):
    assert listener.wait(0.01) is False
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE query LIKE 'LISTEN%%' AND datname = current_database()"
        )
    with pytest.raises(Exception, match=r"terminat|closed"):
        listener.wait(1.0)
    listener.close()
    assert listener.wait(0.01) is False
