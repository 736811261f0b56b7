"""Repeats one step until it is told to stop; a step that fails is logged and tried again, for as long as it takes.

The dispatcher, the reaper and the sender of webhooks each are one such loop. Knows nothing of what a step does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
LONGEST_PAUSE_S = 5.0


class Loop:
    """A thread that runs `step`, then `pause` for the time until the next one."""

    def __init__(
        self,
        name: str,
        *,
        step: Callable[[], None],
        pause: Callable[[], None],
        stopping: threading.Event,
        retry_s: float,
    ) -> None:
        self._name = name
        self._step = step
        self._pause = pause
        self._stopping = stopping
        self._retry_s = retry_s
        self._thread = threading.Thread(target=self._run, name=name)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            try:
                self._step()
                self._pause()
            except Exception:
                # The border of the process: whatever broke, jobs must go on once it is whole.
                failures += 1
                log.exception("%s failed %d times in a row; it tries again", self._name, failures)
                self._stopping.wait(min(self._retry_s * failures, LONGEST_PAUSE_S))
            else:
                failures = 0
