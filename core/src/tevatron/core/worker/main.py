"""A worker process: Celery wakes it, it runs jobs one after the other, SIGTERM stops the running one at once.

The pool is `solo`: the job runs in the main thread, so no broker traffic happens meanwhile; afterwards Celery
reconnects if it must.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Mapping

from celery import signals
from celery.exceptions import SecurityWarning

from tevatron.core.contracts.jobs import JobKind
from tevatron.core.logging import configure_logging
from tevatron.core.settings import Settings
from tevatron.core.store.session import check_schema, make_engine, make_sessions
from tevatron.core.worker.celery_app import QUEUES, WAKE_TASK, check_settings, make_celery
from tevatron.core.worker.context import TRANSIENT
from tevatron.core.worker.runner import Handler, run_next_job

logger = logging.getLogger(__name__)


class _Shutdown:
    """A flag that a signal handler may set: no lock is taken, so nothing can deadlock."""

    def __init__(self) -> None:
        self.requested = False

    def request(self, **_: object) -> None:
        self.requested = True

    def is_requested(self) -> bool:
        return self.requested


def _keep_logging() -> None:
    """Keep Celery from setting the level of all loggers to its own, a warning; of its own we read no more than that."""
    signals.setup_logging.connect(lambda **_: None, weak=False)
    logging.getLogger("celery").setLevel(logging.WARNING)


def serve(service: str, handlers: Mapping[JobKind, Handler], settings: Settings) -> int:
    """Run a worker until it is told to stop; return its exit status.

    On SIGTERM the running job's `stop_reason` becomes `SHUTDOWN`; its handler has `settings.stop_grace_s` to save what
    it has, then the job goes back to the queue.
    """
    configure_logging(service)
    _keep_logging()
    # Celery warns root of pickled messages; ours are JSON.
    warnings.filterwarnings("ignore", category=SecurityWarning)
    engine = make_engine(settings.require_database())
    check_schema(engine)
    sessions = make_sessions(engine)
    shutdown = _Shutdown()
    worker_name = f"{service}@{socket.gethostname()}:{os.getpid()}"

    def wake(job_id: str) -> None:
        """Run jobs until none is left; `job_id` only says which row the message was sent for."""
        try:
            while run_next_job(
                list(handlers),
                handlers=handlers,
                settings=settings,
                sessions=sessions,
                worker_name=worker_name,
                should_stop=shutdown.is_requested,
            ):
                pass
        except TRANSIENT:
            # The dispatcher wakes us again for every row that is still queued.
            logger.exception("woken for %s, but the database does not answer", job_id)

    app = make_celery(settings)
    check_settings(app)
    app.task(name=WAKE_TASK)(wake)
    # Sent inside Celery's handler of SIGTERM, SIGINT and SIGQUIT: in the main thread, in the middle of the job.
    signals.worker_shutting_down.connect(shutdown.request, weak=False)
    kinds = ", ".join(sorted(handlers))
    signals.worker_ready.connect(lambda **_: logger.info("waiting for jobs: %s", kinds), weak=False)
    worker = app.Worker(
        hostname=worker_name,
        pool_cls="solo",
        queues=sorted({QUEUES[kind] for kind in handlers}),
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
    )
    try:
        worker.start()
    finally:
        engine.dispose()
    return int(worker.exitcode or 0)
