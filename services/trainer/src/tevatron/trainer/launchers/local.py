"""Launches with torchrun on this machine's own devices.

Owns the command line and the children's environment.

torchrun puts each rank into a session of its own, so killing its process group leaves the ranks alive. Here torchrun
dies with the worker (exec wrapper), each rank with torchrun (`die_with_parent`), and whatever else the ranks started
is found by the marker in its environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tevatron.core.environment import child_environment
from tevatron.core.errors import ConfigError
from tevatron.core.process import ATTEMPT_VARIABLE, end_processes, guarded
from tevatron.core.settings import Settings
from tevatron.trainer.launchers.base import Exit, Launch
from tevatron.trainer.launchers.torchrun import (
    ask_ranks_to_stop,
    interpreter,
    num_threads,
    read_log,
    torchrun_end,
    torchrun_variables,
)


class LocalLauncher:
    """torchrun --standalone on the devices of TEVATRON_DEVICES."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._devices = settings.devices

    def check(self, *, num_processes: int, num_nodes: int | None) -> None:
        """Raise `ConfigError` for several nodes, or where there are fewer GPUs than ranks."""
        if num_nodes not in (None, 1):
            raise ConfigError(
                f"num_nodes: expected 1, the worker's machine, with launcher 'local', got {num_nodes}"
            )
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
            str(interpreter(self._settings, launch.environment)),
            *("-m", "torch.distributed.run"),
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

    def adopt(self, job_id: str, *, run_folder: Path) -> None:
        """End the processes of earlier attempts, which must not write into the run folder any more."""
        end_processes(f"{job_id}:", 0)

    def _environment(self, launch: Launch) -> dict[str, str]:
        # The worker has fetched what comes from the hub.
        environment = child_environment(os.environ, devices=self._devices, trackers=launch.trackers)
        environment.setdefault("OMP_NUM_THREADS", num_threads(num_ranks=launch.num_processes))
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment |= torchrun_variables(stop_grace_s=self._settings.stop_grace_s)
        environment[ATTEMPT_VARIABLE] = launch.marker
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
        ended = torchrun_end(status, read_log(self._launch.log_path, start=self._log_start))
        return Exit(status=status, killed=ended.killed, message=ended.message)

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the ranks, or to torchrun where it has none yet."""
        ask_ranks_to_stop(self._process.pid, marker=self._launch.marker)

    def end(self, *, grace_s: float) -> None:
        """End every process of the attempt, prove that none is left, and reap torchrun."""
        end_processes(self._launch.marker, grace_s)
        self._process.wait()
        shutil.rmtree(self._ranks_folder, ignore_errors=True)
