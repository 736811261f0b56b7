"""What every way to start torchrun shares: its interpreter, the ranks' environment, its report of how they ended.

Knows nothing of where torchrun runs, or on how many nodes.
"""

from __future__ import annotations

import math
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tevatron.core.errors import ConfigError
from tevatron.core.process import parent_pid, processes_with_marker
from tevatron.core.settings import Settings
from tevatron.trainer.launchers.base import Environment

REPORT_BYTES = 64 * 2**10
SHUTDOWN_MARGIN_S = 15
"""On top of the time that ranks have to save their state: what torchrun takes itself."""
_SAME_FAILURE_S = 10.0
"""A rank that a signal ended within this time of the first failure was not ended by torchrun itself, which sends
SIGKILL only after its shutdown timeout."""
_AGENT_LINE = re.compile(r"^[EW]\d{4} .*torch/distributed/elastic/.*$", re.MULTILINE)
"""torchrun speaks of a rank's end; from here on the log is its own report and traceback."""
_RANK_REPORT = re.compile(
    r"^\s*time\s+: (?P<time>\d{4}-\d\d-\d\d_\d\d:\d\d:\d\d)\s*\n"
    r"(?:.*\n)?"
    r"^\s*rank\s+: (?P<rank>\d+) .*\n"
    r"^\s*exitcode\s+: (?P<code>-?\d+) \(pid: ",
    re.MULTILINE,
)
_TAIL_LINES = 20
_TAIL_CHARACTERS = 4000


def interpreter(settings: Settings, environment: Environment) -> Path:
    """Return the Python of an environment on this machine; `ConfigError` where there is none."""
    if environment == "hf":
        return Path(sys.executable)
    python = settings.megatron_python
    if python is None or not python.is_file():
        found = "nothing" if python is None else f"{python}, which is not there"
        raise ConfigError(
            "backend 'megatron': expected TEVATRON_MEGATRON_PYTHON to name the interpreter of the environment with "
            f"Megatron, got {found}"
        )
    return python


def torchrun_variables(*, stop_grace_s: float) -> dict[str, str]:
    """Return the variables that torchrun itself needs."""
    return {
        "PYTHONUNBUFFERED": "1",
        # torchrun kills ranks that are still saving 30 s after SIGTERM unless told otherwise.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(stop_grace_s) + SHUTDOWN_MARGIN_S),
    }


def num_threads(*, num_ranks: int) -> str:
    """Return OMP_NUM_THREADS for ranks that share this machine."""
    return str(max(1, len(os.sched_getaffinity(0)) // num_ranks))


def ask_ranks_to_stop(torchrun_pid: int, *, marker: str) -> None:
    """Send SIGTERM to the ranks of a torchrun, or to itself where it has none yet.

    Not to torchrun with ranks: it would report that they were stopped by a signal although they saved and
    ended well.
    """
    ranks = [pid for pid in processes_with_marker(marker) if parent_pid(pid) == torchrun_pid]
    for pid in ranks or [torchrun_pid]:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue  # It ended by itself.


class RankEnd(NamedTuple):
    """What torchrun reports of a rank that did not end well."""

    rank: int
    code: int
    """Exit status; negative for a signal."""
    time_s: float

    def sentence(self) -> str:
        """Return this for people."""
        return _sentence(f"rank {self.rank}", self.code)


class TorchrunEnd(NamedTuple):
    """How a torchrun and its ranks ended."""

    killed: bool
    """Whether a signal from outside ended it or a rank first."""
    message: str


def read_log(path: Path, *, start: int) -> str:
    """Return the end of what was written to a log from the byte `start` on."""
    with path.open("rb") as log:
        size = log.seek(0, os.SEEK_END)
        log.seek(max(start, size - REPORT_BYTES))
        return log.read().decode("utf-8", errors="replace")


def torchrun_end(status: int, output: str) -> TorchrunEnd:
    """Return what a torchrun's exit status and the end of its log say."""
    ends = rank_ends(output)
    how = [end.sentence() for end in ends] or [_sentence("torchrun", status)]
    return TorchrunEnd(
        killed=status < 0 or was_killed(ends),
        message=f"{'; '.join(how)}; the log ends:\n{program_tail(output)}",
    )


def rank_ends(output: str) -> list[RankEnd]:
    """Return the failed ranks of torchrun's report, each once, in the order of their time."""
    found = {
        int(match["rank"]): RankEnd(
            rank=int(match["rank"]),
            code=int(match["code"]),
            time_s=time.mktime(time.strptime(match["time"], "%Y-%m-%d_%H:%M:%S")),
        )
        for match in _RANK_REPORT.finditer(output)
    }
    return sorted(found.values(), key=lambda end: end.time_s)


def was_killed(ends: Sequence[RankEnd]) -> bool:
    """Say whether a signal ended a rank first.

    When a rank is killed, its siblings fail as well, for want of it, and may even be seen first. torchrun then sends
    them SIGTERM, so that signal says nothing about the cause.
    """
    return any(
        end.code < 0
        and end.code != -signal.SIGTERM
        and end.time_s - ends[0].time_s < _SAME_FAILURE_S
        for end in ends
    )


def program_tail(output: str) -> str:
    """Return the last lines of the log before torchrun's own report."""
    report = _AGENT_LINE.search(output)
    text = output if report is None else output[: report.start()]
    return "\n".join(text.splitlines()[-_TAIL_LINES:])[-_TAIL_CHARACTERS:] or "(it is empty)"


def _sentence(who: str, code: int) -> str:
    if code >= 0:
        return f"{who} ended with status {code}"
    try:
        return f"{who} was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"{who} was killed by signal {-code}"
