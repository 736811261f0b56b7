"""Launches with torchrun on this machine's own devices.

Owns the command line, the children's environment and the reading of torchrun's report of how the ranks ended.

torchrun puts each rank into a session of its own, so killing its process group leaves the ranks alive. Here torchrun
dies with the worker (exec wrapper), each rank with torchrun (`die_with_parent`), and whatever else the ranks started
is found by the marker in its environment.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tevatron.core.environment import child_environment
from tevatron.core.errors import ConfigError
from tevatron.core.process import (
    ATTEMPT_VARIABLE,
    end_processes,
    guarded,
    parent_pid,
    processes_with_marker,
)
from tevatron.core.settings import Settings
from tevatron.trainer.launchers.base import Exit, Launch

_REPORT_BYTES = 64 * 2**10
_SAME_FAILURE_S = 10.0
"""A rank that a signal ended within this time of the first failure was not ended by torchrun itself, which sends
SIGKILL only after its shutdown timeout."""
_SHUTDOWN_MARGIN_S = 15
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


class LocalLauncher:
    """torchrun --standalone on the devices of TEVATRON_DEVICES."""

    def __init__(self, settings: Settings) -> None:
        self._devices = settings.devices
        self._stop_grace_s = settings.stop_grace_s

    def check(self, *, num_processes: int) -> None:
        """Raise `ConfigError` where there are fewer GPUs than ranks."""
        if self._devices is None or self._devices == "cpu":
            return
        devices = self._devices.split(",")
        if num_processes > len(devices):
            raise ConfigError(
                f"num_processes: expected at most {len(devices)}, one for each device of this worker "
                f"(TEVATRON_DEVICES={self._devices}), got {num_processes}"
            )

    def start(self, launch: Launch) -> LocalHandle:
        """Start torchrun as a guarded child in a session of its own."""
        ranks_folder = launch.run_folder / "torchrun"
        argv = [
            *(str(launch.python or sys.executable), "-m", "torch.distributed.run"),
            # A free port each time: two stacks on one machine do not meet.
            "--standalone",
            # Without it torch resolves the machine's own name, which containers often cannot.
            *("--local-addr", "127.0.0.1"),
            *("--nproc-per-node", str(launch.num_processes)),
            *("--log-dir", str(ranks_folder)),
            *("-m", launch.module, str(launch.config_path)),
        ]
        with launch.log_path.open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                guarded(argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=launch.run_folder,
                env=self._environment(launch),
                start_new_session=True,
            )
        return LocalHandle(process, launch=launch, log_start=log_start, ranks_folder=ranks_folder)

    def clear(self, job_id: str) -> None:
        """End the processes of earlier attempts, which must not write into the run folder any more."""
        end_processes(f"{job_id}:", 0)

    def _environment(self, launch: Launch) -> dict[str, str]:
        # The worker has fetched what comes from the hub.
        environment = child_environment(os.environ, devices=self._devices)
        num_threads = max(1, len(os.sched_getaffinity(0)) // launch.num_processes)
        environment.setdefault("OMP_NUM_THREADS", str(num_threads))
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment[ATTEMPT_VARIABLE] = launch.marker
        environment["PYTHONUNBUFFERED"] = "1"
        # torchrun kills ranks that are still saving 30 s after SIGTERM unless told otherwise.
        environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(
            math.ceil(self._stop_grace_s) + _SHUTDOWN_MARGIN_S
        )
        return environment


class LocalHandle:
    """A torchrun process and its ranks."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        *,
        launch: Launch,
        log_start: int,
        ranks_folder: Path,
    ) -> None:
        self._process = process
        self._launch = launch
        self._log_start = log_start
        self._ranks_folder = ranks_folder

    def poll(self) -> Exit | None:
        """Return how torchrun ended, and by its report whether a signal ended a rank first."""
        status = self._process.poll()
        if status is None:
            return None
        output = self._output()
        ends = rank_ends(output)
        how = [end.sentence() for end in ends] or [_sentence("torchrun", status)]
        return Exit(
            status=status,
            killed=status < 0 or was_killed(ends),
            message=f"{'; '.join(how)}; the log ends:\n{program_tail(output)}",
        )

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the ranks, or to torchrun where it has none yet.

        Not to torchrun with ranks: it would report that they were stopped by a signal although they saved and
        ended well.
        """
        marked = processes_with_marker(self._launch.marker)
        ranks = [pid for pid in marked if parent_pid(pid) == self._process.pid]
        for pid in ranks or [self._process.pid]:
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                continue  # It ended by itself.

    def end(self, *, grace_s: float) -> None:
        """End every process of the attempt, prove that none is left, and reap torchrun."""
        end_processes(self._launch.marker, grace_s)
        self._process.wait()
        shutil.rmtree(self._ranks_folder, ignore_errors=True)

    def _output(self) -> str:
        with self._launch.log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_start, size - _REPORT_BYTES))
            return log.read().decode("utf-8", errors="replace")


class RankEnd(NamedTuple):
    """What torchrun reports of a rank that did not end well."""

    rank: int
    code: int
    """Exit status; negative for a signal."""
    time_s: float

    def sentence(self) -> str:
        """Return this for people."""
        return _sentence(f"rank {self.rank}", self.code)


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
