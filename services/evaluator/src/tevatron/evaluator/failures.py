"""What a slot of a backend has borne, and when that is too much. Knows errors, not requests."""

from __future__ import annotations

import time

from tevatron.evaluator.answers import AgainError


class Failures:
    """What one slot has borne since it last succeeded."""

    def __init__(self, *, tries: int, busy_s: float) -> None:
        self._tries, self._busy_s = tries, busy_s
        self._busy_until: float | None = None
        self.in_a_row = 0

    def count(self, error: AgainError) -> str | None:
        """Count one more; return why the backend is down where it is one too many."""
        if error.is_busy:
            now = time.monotonic()
            self._busy_until = self._busy_until or now + self._busy_s
            if now + error.pause_s < self._busy_until:
                self.in_a_row = 0
                return None
        self.in_a_row += 1
        if self.in_a_row < self._tries:
            return None
        return f"{error} ({self.in_a_row} tries)"

    def forget(self) -> None:
        """Begin again: it works, or is down."""
        self.in_a_row = 0
        self._busy_until = None
