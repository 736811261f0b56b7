"""What a launcher is: it starts the ranks of one attempt somewhere and says how they ended.

The worker submits and watches. A launcher knows nothing of jobs, of the database, or of what the program does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from tevatron.core.errors import TevatronError

Environment = Literal["hf", "megatron"]
"""Which of the two environments (interpreter, image) the ranks need."""


class ClusterUnreachableError(TevatronError):
    """The cluster does not answer; nothing is known of what runs there."""

    code = "cluster_unreachable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One attempt to be started."""

    module: str
    """Python module that every rank runs."""
    config_path: Path
    """Its only argument."""
    run_folder: Path
    log_path: Path
    """Standard output and error of all ranks, on a cluster of those of the first node; appended to."""
    marker: str
    """`<job id>:<attempt>`, the value of TEVATRON_ATTEMPT in every process of the attempt."""
    num_processes: int
    """Ranks on all nodes together."""
    num_nodes: int | None = None
    """As many as the ranks need when unset."""
    environment: Environment = "hf"
    trackers: Sequence[str] = ()
    """Trackers whose secrets the ranks get of this process; in pods the operator's secrets are mounted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How an attempt ended."""

    status: int
    """Exit status of the launched process; negative for a signal."""
    killed: bool
    """Whether a signal from outside (kill -9, the out-of-memory killer, a crash) or the loss of a node ended it or a
    rank first."""
    message: str
    """Which rank ended how, and the last lines that the program itself wrote."""


class Handle(Protocol):
    """A started attempt."""

    def poll(self) -> Exit | None:
        """Return how it ended; None while it runs, or waits for its turn."""

    def end(self, *, grace_s: float) -> None:
        """SIGTERM, `grace_s`, SIGKILL of every process; returns only when none is left, or raises."""


@runtime_checkable
class AttachedHandle(Handle, Protocol):
    """An attempt whose ranks cannot outlive this worker. Any other is left to run when its worker goes."""

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the ranks: they save their state and end, or end at once where a cancel file lies."""


class Launcher(Protocol):
    """Starts attempts."""

    def check(self, *, num_processes: int, num_nodes: int | None) -> None:
        """Raise `ConfigError` where this many ranks cannot be started."""

    def start(self, launch: Launch) -> Handle:
        """Start the ranks; call it from a thread that lives as long as the attempt.

        Starting an attempt that is there already returns that one. Raises `ConfigError` where it is refused.
        """

    def adopt(self, job_id: str, *, run_folder: Path) -> Handle | None:
        """Return the attempt of this job that still runs without its worker; end what is left of any other."""
