"""The reaper: takes back jobs and scorers whose holder died. Knows the store only."""

from __future__ import annotations

import logging
import threading

from tevatron.core.store.outbox import Reaped, reap
from tevatron.core.store.session import Sessions

log = logging.getLogger(__name__)


class Reaper:
    """One look after the other."""

    def __init__(
        self,
        sessions: Sessions,
        *,
        grace_s: float,
        max_attempts: int,
        poll_s: float,
        stopping: threading.Event,
    ) -> None:
        self._sessions = sessions
        self._grace_s = grace_s
        self._max_attempts = max_attempts
        self._poll_s = poll_s
        self._stopping = stopping

    def step(self) -> None:
        """Take back what is lost."""
        with self._sessions.begin() as session:
            done = reap(session, grace_s=self._grace_s, max_attempts=self._max_attempts)
        _report(done)

    def pause(self) -> None:
        """Wait for the next look."""
        self._stopping.wait(self._poll_s)


def _report(done: Reaped) -> None:
    for what, ids in (
        ("queued again", done.requeued),
        ("failed", done.failed),
        ("cancelled", done.cancelled),
        ("taken back", done.scorers),
    ):
        for row_id in ids:
            log.warning("%s: %s", row_id, what)
