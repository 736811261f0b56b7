"""What a job's handler sees of the machinery: it reports, and learns whether to stop.

A thread renews the lease, looks for a cancel request and stores what was reported. A database that does not answer is
waited for until the lease is over; from then on the job belongs to another and nothing more is written. No session is
open while the handler works.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from typing import TypeVar

from pydantic import JsonValue
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from tevatron.core.contracts.jobs import EventType, Phase
from tevatron.core.settings import Settings
from tevatron.core.store.claims import Claim, append_events, heartbeat, look
from tevatron.core.store.leases import LeaseLostError
from tevatron.core.store.lifecycle import NewEvent
from tevatron.core.store.session import Sessions

logger = logging.getLogger(__name__)

TRANSIENT = (OperationalError, InterfaceError, PoolTimeoutError)
"""Errors of a database that may answer again."""
FLUSH_S = 1.0
"""What was reported is stored at least this often."""
SLICE_S = 0.05
"""A shutdown is a flag set by a signal handler, which cannot safely wake a waiting thread; so it is looked at."""
RETRY_S = 0.5
MAX_MESSAGE = 10_000

Answer = TypeVar("Answer")


class StopReason(StrEnum):
    """Why a job must stop."""

    CANCELLED = "cancelled"
    LEASE_LOST = "lease_lost"
    SHUTDOWN = "shutdown"


class Stopped(Exception):  # noqa: N818  not an error: the handler was asked to stop, and has
    """Raised out of a handler that has stopped: none of its processes is left."""

    def __init__(self, reason: StopReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


class JobContext:
    """One attempt at a job, as its handler sees it."""

    def __init__(
        self,
        claim: Claim,
        *,
        settings: Settings,
        sessions: Sessions,
        should_stop: Callable[[], bool],
        claimed_at: float,
    ) -> None:
        self.claim = claim
        self.settings = settings
        self.sessions = sessions
        self._should_stop = should_stop
        self.save_requested_at: datetime | None = None
        """When a user last asked for a state of what is trained."""
        self.stop_requested_at: datetime | None = None
        """When a user asked what is trained to end after its step, and to be published."""
        self._reason: StopReason | None = None
        self._deadline = claimed_at + settings.lease_s
        self._next_beat = claimed_at + settings.heartbeat_s
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._buffer: list[NewEvent] = []
        self._sealed: list[NewEvent] = []
        self._in_doubt = False
        self._silent = False
        self._progress_from: tuple[float, int] | None = None

    def phase(self, phase: Phase) -> None:
        """Begin a phase."""
        self._progress_from = None
        self._report(EventType.PHASE, {"phase": phase.value})
        self._try_to_store()

    def progress(self, done: int, total: int, unit: str) -> None:
        """Say how far the phase is; only the newest is stored where several come within a second."""
        now = time.monotonic()
        if self._progress_from is None or done < self._progress_from[1]:
            self._progress_from = (now, done)
        started, first = self._progress_from
        speed = (done - first) / (now - started) if done > first and now > started else 0.0
        data: dict[str, JsonValue] = {
            "done": done,
            "total": total,
            "unit": unit,
            "eta_s": round((total - done) / speed, 1) if speed else None,
        }
        with self._lock:
            if self._buffer and self._buffer[-1].type is EventType.PROGRESS:
                self._buffer.pop()
            self._buffer.append(NewEvent(EventType.PROGRESS, data))

    def metrics(self, values: dict[str, JsonValue]) -> None:
        """Report the numbers of a training step, or of an evaluation."""
        self._report(EventType.METRICS, values)

    def log(self, level: str, message: str) -> None:
        """Leave a message in the job's history."""
        self._report(EventType.LOG, {"level": level, "message": message[:MAX_MESSAGE]})

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the job must stop, or nothing."""
        if self.lease_left_s < 0:
            # Here too, and not only in the thread: that one may hang in the database.
            self.lose_lease("the lease is over: the database did not answer in time")
        return self._reason or (StopReason.SHUTDOWN if self._should_stop() else None)

    def check(self) -> None:
        """Raise `Stopped` when the job must stop."""
        reason = self.stop_reason
        if reason is not None:
            raise Stopped(reason)

    def wait(self, seconds: float) -> StopReason | None:
        """Sleep, but no longer than until the job must stop; return why."""
        end = time.monotonic() + seconds
        while (reason := self.stop_reason) is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, SLICE_S))
        return reason

    def in_transaction(self, work: Callable[[Session], Answer]) -> Answer:
        """Run `work` in a transaction of its own, again while the database does not answer.

        `work` may run more than once. Raises `Stopped` when the job must stop before it came through.
        """
        while True:
            try:
                with self.sessions.begin() as session:
                    return work(session)
            except TRANSIENT as error:
                self.note_silence(error)
            if self.wait(RETRY_S) is not None:
                self.check()

    @property
    def lease_left_s(self) -> float:
        """Seconds until another may take the job; negative afterwards."""
        return self._deadline - time.monotonic()

    def store_reports(self) -> None:
        """Store what was reported so far; raises `LeaseLostError`, and `TRANSIENT` errors."""
        with self._flushing:
            while self._seal():
                try:
                    with self.sessions.begin() as session:
                        append_events(session, self.claim, self._sealed, in_doubt=self._in_doubt)
                except TRANSIENT:
                    # Kept for the next time; the commit may have happened all the same.
                    self._in_doubt = True
                    raise
                except DBAPIError:
                    # The database refuses these lines and always will; a report must not stop the job.
                    logger.exception("dropped %d events that cannot be stored", len(self._sealed))
                self._sealed = []
                self._in_doubt = False

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Renew the lease in a thread for the length of the block."""
        thread = threading.Thread(target=self._beat_until_over, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _beat_until_over(self) -> None:
        pause = min(self.settings.poll_s, self.settings.heartbeat_s, FLUSH_S)
        while not self._over.wait(pause):
            try:
                self._beat()
            except Exception:
                # The thread must live: without it the lease ends and a second attempt starts beside this one.
                logger.exception("the heartbeat failed for a reason that is not the database's")
            if self.stop_reason is StopReason.LEASE_LOST:
                return

    def _beat(self) -> None:
        now = time.monotonic()
        try:
            with self.sessions.begin() as session:
                if now >= self._next_beat:
                    beat = heartbeat(session, self.claim, self.settings.lease_s)
                else:
                    beat = look(session, self.claim)
        except LeaseLostError as error:
            self.lose_lease(str(error))
            return
        except TRANSIENT as error:
            self.note_silence(error)
            return
        if now >= self._next_beat:
            self._deadline = now + self.settings.lease_s
            self._next_beat = now + self.settings.heartbeat_s
        self.save_requested_at = beat.save_requested_at
        self.stop_requested_at = beat.stop_requested_at
        if beat.cancel_requested and self._reason is None:
            self._reason = StopReason.CANCELLED
        self._silent = False
        self._try_to_store()

    def lose_lease(self, message: str) -> None:
        """Regard the job as another's from now on."""
        if self._reason is not StopReason.LEASE_LOST:
            self._reason = StopReason.LEASE_LOST
            logger.error("stopping: %s", message)

    def note_silence(self, error: Exception) -> None:
        """Log that the database does not answer, once until it does again."""
        if not self._silent:
            self._silent = True
            logger.warning(
                "the database does not answer, %.0f s of the lease are left: %s",
                self.lease_left_s,
                error,
            )

    def _report(self, kind: EventType, data: dict[str, JsonValue]) -> None:
        with self._lock:
            self._buffer.append(NewEvent(kind, data, datetime.now(UTC)))

    def _try_to_store(self) -> None:
        if self._reason is StopReason.LEASE_LOST:
            return
        try:
            self.store_reports()
        except LeaseLostError as error:
            self.lose_lease(str(error))
        except TRANSIENT as error:
            self.note_silence(error)

    def _seal(self) -> bool:
        """Fix the next batch, unless one is still on its way; say whether there is any."""
        if not self._sealed:
            with self._lock:
                self._sealed, self._buffer = self._buffer, []
        return bool(self._sealed)
