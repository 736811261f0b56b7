"""What a launcher is: it starts the ranks of one attempt somewhere and says how they ended.

The worker submits and watches. A launcher knows nothing of jobs, of the database, or of what the program does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One attempt to be started."""

    module: str
    """Python module that every rank runs."""
    config_path: Path
    """Its only argument."""
    run_folder: Path
    log_path: Path
    """Standard output and error of all ranks; appended to."""
    marker: str
    """Value of TEVATRON_ATTEMPT in every process of the attempt."""
    num_processes: int
    python: Path | None = None
    """Interpreter of the ranks; this process's own when unset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How an attempt ended."""

    status: int
    """Exit status of the launched process; negative for a signal."""
    killed: bool
    """Whether a signal from outside (kill -9, the out-of-memory killer, a crash) ended it or a rank first."""
    message: str
    """Which rank ended how, and the last lines that the program itself wrote."""


class Handle(Protocol):
    """A started attempt."""

    def poll(self) -> Exit | None:
        """Return how it ended; None while it runs."""

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the ranks: they save their state and end, or end at once where a cancel file lies."""

    def end(self, *, grace_s: float) -> None:
        """SIGTERM, `grace_s`, SIGKILL of every process; returns only when none is left, or raises."""


class Launcher(Protocol):
    """Starts attempts."""

    def check(self, *, num_processes: int) -> None:
        """Raise `ConfigError` where this many ranks cannot be started here."""

    def start(self, launch: Launch) -> Handle:
        """Start the ranks; call it from a thread that lives as long as the attempt."""

    def clear(self, job_id: str) -> None:
        """End what is left of any earlier attempt of this job."""
