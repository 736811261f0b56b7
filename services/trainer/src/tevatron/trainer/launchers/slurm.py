"""Slurm as a cluster: each attempt is a batch job, whose file can also be printed.

Owns the batch file and the calls of sbatch, squeue and scancel; accounting (sacct) is not needed. The nodes must see
TEVATRON_DATA and the interpreters under the same paths as this machine.
"""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tevatron.core.environment import child_environment
from tevatron.core.errors import ConfigError
from tevatron.core.process import ATTEMPT_VARIABLE
from tevatron.core.settings import Settings
from tevatron.trainer.launchers.base import ClusterUnreachableError, Launch
from tevatron.trainer.launchers.cluster import ClusterLauncher, Sight, Stage, insist, job_prefix
from tevatron.trainer.launchers.torchrun import SHUTDOWN_MARGIN_S, interpreter

_OVER = frozenset(
    [
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    ]
)
"""Final states of a job, by Slurm's long names."""
_PASSING = ("Unable to contact", "Socket timed out")
"""What sbatch says where it may go well a little later."""
_POLL_S = 0.5
_CALL_S = 60.0
_END_S = 120.0
"""After SIGKILL; the steps of a lost node stay COMPLETING for longer, maybe until it is back."""


class Batch(NamedTuple):
    """What a batch file is made of."""

    name: str
    command: Sequence[str]
    """Runs once on each node."""
    num_nodes: int
    ranks_per_node: int
    output: str
    """Of the batch file itself; `%j` stands for the job's id."""
    variables: dict[str, str]


class Listed(NamedTuple):
    """A line of squeue."""

    id: str
    name: str
    state: str
    reason: str


def batch_file(settings: Settings, batch: Batch) -> str:
    """Return the batch file."""
    grace_s = math.ceil(settings.stop_grace_s) + SHUTDOWN_MARGIN_S
    options = [
        f"--job-name={batch.name}",
        f"--nodes={batch.num_nodes}",
        "--ntasks-per-node=1",
        f"--output={batch.output}",
        "--open-mode=append",
        # Another attempt is the platform's to start.
        "--no-requeue",
    ]
    if settings.slurm_gpus_per_node:
        options.append(f"--gpus-per-node={batch.ranks_per_node}")
    if settings.slurm_partition is not None:
        options.append(f"--partition={settings.slurm_partition}")
    if settings.slurm_time_min is not None:
        # Before the time is over the ranks save their state.
        options += [f"--time={settings.slurm_time_min}", f"--signal=TERM@{grace_s}"]
    options += shlex.split(settings.slurm_options)
    exports = [f"export {name}={shlex.quote(text)}" for name, text in batch.variables.items()]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            *exports,
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            "export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))",
            f"exec srun --kill-on-bad-exit=1 {shlex.join(batch.command)}",
            "",
        ]
    )


def node_command(
    settings: Settings, *, python: Path, ranks_per_node: int, log_path: Path | None = None
) -> list[str]:
    """Return the command of a node, but for the module and its arguments."""
    return [
        *(str(python), "-m", "tevatron.trainer.launchers.node"),
        *("--ranks-per-node", str(ranks_per_node)),
        *("--stop-grace-s", f"{settings.stop_grace_s:g}"),
        *(
            ()
            if log_path is None
            else ("--log", str(log_path), "--unwatched-s", f"{settings.unwatched_s:g}")
        ),
    ]


def node_python(settings: Settings, environment: str) -> Path:
    """Return the interpreter of an environment on the nodes."""
    if environment == "hf":
        return settings.slurm_python or Path(sys.executable)
    return interpreter(settings, "megatron")


def sbatch(text: str, *, folder: Path, environment: Mapping[str, str] | None) -> str:
    """Submit a batch file, whose job gets this environment, or this process's own, and return the job's id."""
    argv = ["sbatch", "--parsable", f"--chdir={folder}"]
    return _call(argv, text=text, environment=environment).partition(";")[0].strip()


class SlurmCluster:
    """The cluster that sbatch on this machine submits to."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.gpus_per_node = settings.slurm_gpus_per_node

    def submit(self, name: str, launch: Launch, *, num_nodes: int) -> None:
        """Submit it unless one of this name is there."""
        if _listed(name=name):
            return
        ranks_per_node = launch.num_processes // num_nodes
        command = node_command(
            self._settings,
            python=node_python(self._settings, launch.environment),
            ranks_per_node=ranks_per_node,
            log_path=launch.log_path,
        )
        batch = Batch(
            name=name,
            command=[*command, launch.module, str(launch.config_path)],
            num_nodes=num_nodes,
            ranks_per_node=ranks_per_node,
            # Of the nodes' entries.
            output=str(launch.log_path.with_suffix(".slurm.log")),
            variables={ATTEMPT_VARIABLE: launch.marker},
        )
        sbatch(
            batch_file(self._settings, batch),
            folder=launch.run_folder,
            # Without this process's secrets, but for those of the run's trackers.
            environment=child_environment(os.environ, devices=None, trackers=launch.trackers),
        )

    def look(self, name: str) -> Sight | None:
        """Return what squeue says; Slurm forgets a job some minutes after its end."""
        found = _listed(name=name)
        if not found:
            return None
        if any(entry.state not in _OVER for entry in found):
            return Sight(Stage.ALIVE)
        last = max(found, key=lambda entry: int(entry.id))
        stage = Stage.SUCCEEDED if last.state == "COMPLETED" else Stage.FAILED
        return Sight(stage, f"Slurm job {last.id} is {last.state} ({last.reason})")

    def names(self, job_id: str) -> list[str]:
        """Return the names of this job's attempts."""
        prefix = job_prefix(job_id)
        return sorted({entry.name for entry in _listed() if entry.name.startswith(prefix)})

    def end(self, name: str, *, grace_s: float) -> None:
        """Cancel it: SIGTERM, `grace_s`, SIGKILL; return when its steps are gone."""
        if not self._is_alive(name):
            return
        _call(["scancel", f"--name={name}"])
        if self._is_gone_within(name, grace_s):
            return
        _call(["scancel", f"--name={name}", "--signal=KILL"])
        self._is_gone_within(name, _END_S)

    def _is_gone_within(self, name: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while insist(lambda: self._is_alive(name)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def _is_alive(self, name: str) -> bool:
        sight = self.look(name)
        return sight is not None and sight.stage is Stage.ALIVE


class SlurmLauncher(ClusterLauncher):
    """Submits with sbatch."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(SlurmCluster(settings), settings)


def _listed(*, name: str | None = None) -> list[Listed]:
    chosen = [] if name is None else [f"--name={name}"]
    text = _call(["squeue", "--me", "--noheader", "--states=all", "--format=%A|%j|%T|%r", *chosen])
    return [Listed(*line.split("|", 3)) for line in text.splitlines()]


def _call(
    argv: Sequence[str], *, text: str | None = None, environment: Mapping[str, str] | None = None
) -> str:
    """Run one of Slurm's programs and return its output."""
    try:
        done = subprocess.run(
            argv,
            input=text,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_CALL_S,
            check=False,
        )
    except FileNotFoundError as error:
        raise ConfigError(
            f"launcher 'slurm': {argv[0]} is not on this machine's PATH; Slurm's programs and configuration are needed"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ClusterUnreachableError(f"{argv[0]} does not answer within {_CALL_S:g} s") from error
    if done.returncode == 0:
        return done.stdout
    message = f"{argv[0]} says: {done.stderr.strip()}"
    if argv[0] == "sbatch" and not any(word in done.stderr for word in _PASSING):
        raise ConfigError(message)
    raise ClusterUnreachableError(message)
