"""The measured settings are the ones that a worker runs with; wake-ups go to the queue of their kind."""

from __future__ import annotations

import time

import pytest
from pydantic import SecretStr

from tevatron.core.contracts.jobs import JobKind
from tevatron.core.errors import ConfigError, UnavailableError
from tevatron.core.settings import Settings
from tevatron.core.worker.celery_app import (
    QUEUES,
    check_settings,
    make_celery,
    num_messages,
    publish,
)


@pytest.fixture
def app():
    return make_celery(Settings(broker_url=SecretStr("redis://127.0.0.1:1/0")))


def test_a_worker_runs_with_the_measured_settings(app):
    check_settings(app)
    assert {
        name: app.conf[name]
        for name in (
            "task_acks_late",
            "worker_disable_prefetch",
            "worker_prefetch_multiplier",
            "task_reject_on_worker_lost",
            "accept_content",
            "task_serializer",
            "result_backend",
            "broker_transport_options",
        )
    } == {
        "task_acks_late": False,
        "worker_disable_prefetch": True,
        "worker_prefetch_multiplier": 1,
        "task_reject_on_worker_lost": False,
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_backend": None,
        "broker_transport_options": {
            "visibility_timeout": 3600,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 25,
        },
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("task_acks_late", True, "task_acks_late: expected False, got True"),
        ("worker_disable_prefetch", False, "worker_disable_prefetch: expected True, got False"),
        ("worker_pool", "prefork", "worker_pool: expected 'solo', got 'prefork'"),
        ("accept_content", ["pickle"], r"accept_content: expected \['json'\], got \['pickle'\]"),
        ("result_backend", "redis://x", "result_backend: expected none, got 'redis://x'"),
        (
            "broker_transport_options",
            {"visibility_timeout": 5},
            "broker_transport_options.visibility_timeout: expected 3600, got 5",
        ),
    ],
)
def test_a_worker_with_other_settings_is_refused(app, name, value, message):
    app.conf[name] = value
    with pytest.raises(ConfigError, match=message):
        check_settings(app)


def test_every_kind_has_a_queue():
    assert set(QUEUES) == set(JobKind)


def test_wake_ups_lie_in_the_queue_of_their_kind(settings):
    app = make_celery(settings, producer=True)
    for kind in (JobKind.TRAIN, JobKind.EXPORT, JobKind.EVAL):
        publish(app, kind, job_id="job_1")
    assert (num_messages(app, "train"), num_messages(app, "eval")) == (2, 1)
    app.close()


def test_a_broker_that_is_away_is_an_error_at_once():
    app = make_celery(Settings(broker_url=SecretStr("redis://127.0.0.1:1/0")), producer=True)
    started = time.monotonic()
    with pytest.raises(UnavailableError, match="the broker does not answer"):
        publish(app, JobKind.EVAL, job_id="job_1")
    with pytest.raises(UnavailableError, match="the broker does not answer"):
        num_messages(app, "eval")
    # Of kombu's own: it sleeps for a second and more between two tries, until 4 s are over.
    assert time.monotonic() - started < 4
