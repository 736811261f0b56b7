"""SIGTERM: finish the step, save and exit; or exit at once where the run is cancelled or nothing is to be saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tevatron.core.contracts.run import CANCEL_NAME

_STOPPED_STATUS = 143
"""As a shell reports SIGTERM; the watcher goes by events, not by this."""


class Stopper:
    """Turns SIGTERM into a request on which the ranks agree between steps."""

    def __init__(self, run_dir: Path) -> None:
        self._cancel_file = run_dir / CANCEL_NAME
        self._report: Callable[[], None] = lambda: None
        self._was_told = False
        self._is_training = False
        self.agreed = False
        """All ranks end after the same step, whose state is saved."""

    def install(self, report: Callable[[], None]) -> None:
        """Take over SIGTERM; `report` is called before an exit that saves nothing."""
        self._report = report
        signal.signal(signal.SIGTERM, self._on_signal)

    @contextmanager
    def training(self) -> Iterator[None]:
        """Hold back exits while the loop runs, which alone can save a state."""
        self._is_training = True
        yield
        self._is_training = False
        if self._was_told and not self.agreed:
            # Told after the ranks had agreed on the last step, whose state is saved all the same.
            self._exit()

    def agree(self, most: Callable[[int], int]) -> bool:
        """Return whether any rank was told to stop; every rank calls it after the same step.

        `most` returns the largest of all ranks' numbers. A signal that comes meanwhile counts after the next step.
        """
        self.agreed = most(int(self._was_told)) > 0
        return self.agreed

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._cancel_file.exists():
            os._exit(_STOPPED_STATUS)
        self._was_told = True
        if not self._is_training:
            self._exit()

    def _exit(self) -> None:
        self._report()
        os._exit(0)
