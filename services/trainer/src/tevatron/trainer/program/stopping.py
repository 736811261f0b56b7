"""SIGTERM: finish the step, save and exit; or exit at once where the run is cancelled or nothing is to be saved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from tevatron.core.contracts.run import CANCEL_NAME

_STOPPED_STATUS = 143
"""As a shell reports SIGTERM; the watcher goes by events, not by this."""


class Stopper:
    """Turns SIGTERM into a request that the training loop looks at between steps."""

    def __init__(self, run_dir: Path) -> None:
        self._cancel_file = run_dir / CANCEL_NAME
        self._report: Callable[[], None] = lambda: None
        self.requested = False
        self.is_training = False
        """Set while the loop runs, which alone can save a state."""

    def install(self, report: Callable[[], None]) -> None:
        """Take over SIGTERM; `report` is called before an exit that saves nothing."""
        self._report = report
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._cancel_file.exists():
            os._exit(_STOPPED_STATUS)
        self.requested = True
        if not self.is_training:
            self._report()
            os._exit(0)
