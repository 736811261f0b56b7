"""The dispatcher: settles waiting jobs, and sends a wake-up for each queued one. The queued row is the outbox.

Knows the store and the queues, not what a job is.
"""

from __future__ import annotations

import logging

from celery import Celery

from tevatron.core.store.nudges import NudgeListener
from tevatron.core.store.outbox import DueJob, due_jobs, mark_published, settle_waiting
from tevatron.core.store.session import Sessions
from tevatron.core.worker.celery_app import QUEUES, num_messages, publish

log = logging.getLogger(__name__)


class Dispatcher:
    """One look after the other; `step` raises what breaks, and nothing is lost."""

    def __init__(
        self,
        sessions: Sessions,
        celery: Celery,
        listener: NudgeListener,
        *,
        republish_s: float,
        poll_s: float,
    ) -> None:
        self._sessions = sessions
        self._celery = celery
        self._listener = listener
        self._republish_s = republish_s
        self._poll_s = poll_s
        self._unsent: list[DueJob] = []
        """Marked as published, but the broker did not answer."""

    def step(self) -> None:
        """Do all that is due now."""
        while True:
            # Marked and committed before anything is sent: a worker that wakes while these rows are locked would
            # skip them, and sleep on.
            with self._sessions.begin() as session:
                settle_waiting(session)
                due = due_jobs(session, self._republish_s)
                if due:
                    mark_published(session, [job.job_id for job in due])
            self._unsent += due
            self._send()
            if not due:
                return

    def pause(self) -> None:
        """Wait for a nudge, or for the next look."""
        try:
            self._listener.wait(self._poll_s)
        except Exception:
            self._listener.close()
            raise

    def _send(self) -> None:
        empty: dict[str, bool] = {}
        while self._unsent:
            job = self._unsent[0]
            queue = QUEUES[job.kind]
            # A wake-up of the first time always goes out. One sent before may lie behind a long job: another would
            # only make the list longer, unless the broker has lost it.
            if job.published_before and queue not in empty:
                empty[queue] = num_messages(self._celery, queue) == 0
            if not job.published_before or empty[queue]:
                publish(self._celery, job.kind, job_id=job.job_id)
                log.info("woke the %s workers", queue, extra={"job_id": job.job_id})
            self._unsent.pop(0)
