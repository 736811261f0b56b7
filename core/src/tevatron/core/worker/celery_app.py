"""The Celery side of a wake-up: exactly the settings that were measured, the queues, publishing.

A message says only that there may be work; what work is in Postgres. Why each setting has its value: a message that is
acknowledged late, or reserved behind a long job, is delivered again after the visibility timeout, and the job would run
twice (measured, docs/decisions). No result backend, no retries, no countdowns: those are rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from celery import Celery
from kombu.entity import Queue
from kombu.exceptions import OperationalError
from pydantic import JsonValue
from redis.exceptions import RedisError

from tevatron.core.contracts.jobs import JobKind
from tevatron.core.errors import ConfigError, UnavailableError
from tevatron.core.settings import Settings

WAKE_TASK = "tevatron.wake"

QUEUES: dict[JobKind, str] = {
    JobKind.TRAIN: "train",
    JobKind.EXPORT: "train",
    JobKind.EVAL: "eval",
    JobKind.ANNOTATE: "eval",
}
"""Which service's queue wakes the workers of a kind."""

REQUIRED: dict[str, JsonValue] = {
    "task_acks_late": False,
    "task_reject_on_worker_lost": False,
    "task_ignore_result": True,
    "task_serializer": "json",
    "accept_content": ["json"],
    "worker_pool": "solo",
    "worker_concurrency": 1,
    "worker_prefetch_multiplier": 1,
    "worker_disable_prefetch": True,
    "worker_cancel_long_running_tasks_on_connection_loss": False,
    "broker_connection_retry_on_startup": True,
    "broker_connection_max_retries": None,
}
"""A worker refuses to run with other values: see `check_settings`."""

TRANSPORT: dict[str, JsonValue] = {
    "visibility_timeout": 3600,
    "socket_timeout": 30,
    "socket_connect_timeout": 5,
    "socket_keepalive": True,
    "health_check_interval": 25,
}
# The dispatcher would rather fail and try again a second later than wait.
_PRODUCER_TRANSPORT: dict[str, JsonValue] = {
    **TRANSPORT,
    "socket_timeout": 5,
    "socket_connect_timeout": 2,
    # Kombu itself would try again, for 4 s and more, before it says that nobody answers.
    "max_retries": 0,
}


def make_celery(settings: Settings, *, producer: bool = False) -> Celery:
    """Return the application of a worker, or of the dispatcher."""
    app = Celery("tevatron", broker=settings.require_broker(), set_as_current=False)
    app.conf.update(
        REQUIRED,
        broker_transport_options=_PRODUCER_TRANSPORT if producer else TRANSPORT,
        task_queues=[_queue(name) for name in sorted(set(QUEUES.values()))],
        task_publish_retry=False,
        task_create_missing_queues=False,
        # Fleet chatter that nobody reads, and reply queues that nobody empties.
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        # Logs are ours: see core.logging.
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
    )
    return app


def _queue(name: str) -> Queue:
    return Queue(name, routing_key=name)  # type: ignore[no-untyped-call]  # kombu has no types here


def check_settings(app: Celery) -> None:
    """Refuse a worker whose effective settings would run a job twice or lose it."""
    for name, expected in REQUIRED.items():
        found = app.conf[name]
        if found != expected:
            raise ConfigError(f"Celery setting {name}: expected {expected!r}, got {found!r}")
    for name, expected in TRANSPORT.items():
        found = app.conf.broker_transport_options.get(name)
        if found != expected:
            raise ConfigError(
                f"Celery setting broker_transport_options.{name}: expected {expected!r}, got {found!r}"
            )
    if app.conf.result_backend not in (None, "disabled"):
        raise ConfigError(
            f"Celery setting result_backend: expected none, got {app.conf.result_backend!r}"
        )


def publish(app: Celery, kind: JobKind, *, job_id: str) -> None:
    """Send one wake-up; `UnavailableError` when the broker does not answer."""
    with _answering():
        app.send_task(WAKE_TASK, kwargs={"job_id": job_id}, queue=QUEUES[kind], retry=False)


def num_messages(app: Celery, queue: str) -> int:
    """Return how many wake-ups lie in the queue; `UnavailableError` when the broker does not answer."""
    with _answering(), app.connection_for_write() as connection, connection.channel() as channel:
        return int(channel.queue_declare(queue=queue, durable=True).message_count)


@contextmanager
def _answering() -> Iterator[None]:
    try:
        yield
    except (OperationalError, RedisError, OSError) as error:
        raise UnavailableError(f"the broker does not answer: {error}") from error
