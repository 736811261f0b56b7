"""What is asked of a training run from outside, and how its ranks agree on it between steps.

SIGTERM: finish the step, save and exit; or exit at once where the run is cancelled or nothing is to be saved. A file
`save` in the run folder: a state after this step. A file `finish`: this step is the last one, and is published.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import FrameType

from tevatron.core.contracts.run import CANCEL_NAME, FINISH_NAME, SAVE_NAME

_STOPPED_STATUS = 143
"""As a shell reports SIGTERM; the watcher goes by events, not by this."""


class Request(IntEnum):
    """What is asked for after a step; the higher one holds where several are, and each saves a state."""

    NOTHING = 0
    SAVE = 1
    FINISH = 2
    STOP = 3


class Stopper:
    """Turns signals and files into requests on which the ranks agree between steps."""

    def __init__(self, run_dir: Path, *, rank: int) -> None:
        self._cancel_file = run_dir / CANCEL_NAME
        self._files = {
            Request.FINISH: run_dir / FINISH_NAME,
            Request.SAVE: run_dir / SAVE_NAME,
        }
        self._is_main = rank == 0
        self._report: Callable[[], None] = lambda: None
        self._was_told = False
        self._is_training = False
        self.agreed = Request.NOTHING
        """What all ranks do after the step that they have just done."""

    @property
    def stops(self) -> bool:
        """Whether all ranks end after the same step, whose state is saved."""
        return self.agreed is Request.STOP

    @property
    def finishes(self) -> bool:
        """Whether the step was the last one, as was asked for."""
        return self.agreed is Request.FINISH

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
        if self._was_told and not self.stops:
            # Told after the ranks had agreed on the last step, whose state is saved all the same.
            self._exit()

    def agree(self, most: Callable[[int], int]) -> Request:
        """Return what any rank was asked for; every rank calls it after the same step.

        `most` returns the largest of all ranks' numbers. A signal that comes meanwhile counts after the next step.
        """
        self.agreed = Request(most(self._asked()))
        if self._is_main and self.agreed in self._files:
            for file in self._files.values():
                file.unlink(missing_ok=True)
        return self.agreed

    def _asked(self) -> Request:
        if self._was_told:
            return Request.STOP
        # One rank looks: another may see the file a step later.
        files = self._files.items() if self._is_main else ()
        return next((request for request, file in files if file.exists()), Request.NOTHING)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._cancel_file.exists():
            os._exit(_STOPPED_STATUS)
        self._was_told = True
        if not self._is_training:
            self._exit()

    def _exit(self) -> None:
        self._report()
        os._exit(0)
