"""Launches on a cluster whose scheduler starts the nodes: what is the same for each scheduler.

Owns names, the number of nodes, adoption and the judgement of an attempt's end. What a scheduler can do is the Protocol
`Cluster`. The ranks do not depend on the worker: another one finds the attempt by its name and goes on watching, and
ranks that nobody watches end by themselves (see `notes`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from tevatron.core.contracts.run import log_name
from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.trainer.launchers.base import ClusterUnreachableError, Exit, Launch
from tevatron.trainer.launchers.notes import Notes, judge

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

PREFIX = "tevatron-"
_LOOK_EVERY = 5
"""Polls of a worker between two looks: a scheduler has better things to do."""
_SETTLE_S = 10.0
"""How long a node's last word may take through the shared volume after the scheduler saw its end."""
_INSIST_S = 60.0
_RETRY_S = 2.0


class Stage(StrEnum):
    """Where a submission is."""

    ALIVE = "alive"
    """It runs, or waits for its turn."""
    SUCCEEDED = "succeeded"
    FAILED = "failed"


class Sight(NamedTuple):
    """What the scheduler says of a submission."""

    stage: Stage
    message: str = ""


class Cluster(Protocol):
    """A scheduler. Each method may raise `ClusterUnreachableError`, and `ConfigError` where it is refused."""

    gpus_per_node: int
    """0 where the ranks run on CPUs."""

    def submit(self, name: str, launch: Launch, *, num_nodes: int) -> None:
        """Submit under a name; does nothing where that one is there."""

    def look(self, name: str) -> Sight | None:
        """Return where it is; None where there is none of this name."""

    def names(self, job_id: str) -> list[str]:
        """Return the names of this job's attempts that are there."""

    def end(self, name: str, *, grace_s: float) -> None:
        """End every process of a submission, and return when none is left that could still be reached."""


def attempt_name(marker: str) -> str:
    """Return the name of an attempt: `job_019a:2` is `tevatron-019a-2`, which each scheduler takes."""
    job_id, _, attempt = marker.rpartition(":")
    return f"{job_prefix(job_id)}{attempt}"


def job_prefix(job_id: str) -> str:
    """Return what the names of all attempts of a job begin with."""
    return f"{PREFIX}{job_id.removeprefix('job_')}-"


def count_nodes(*, num_processes: int, num_nodes: int | None, gpus_per_node: int) -> int:
    """Return on how many nodes the ranks run, the same number on each; `ConfigError` where they cannot."""
    found = num_nodes or max(1, -(-num_processes // gpus_per_node) if gpus_per_node else 1)
    if num_processes % found != 0:
        raise ConfigError(f"num_nodes({found}) must divide num_processes({num_processes})")
    ranks = num_processes // found
    if gpus_per_node and ranks > gpus_per_node:
        raise ConfigError(
            f"num_processes({num_processes}) on num_nodes({found}): expected at most {gpus_per_node} ranks a node, one "
            f"for each GPU, got {ranks}"
        )
    return found


class ClusterLauncher:
    """Submits attempts to a scheduler."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._pace_s = _LOOK_EVERY * settings.poll_s

    def check(self, *, num_processes: int, num_nodes: int | None) -> None:
        """Raise `ConfigError` where the ranks cannot be spread evenly, or have not enough GPUs."""
        self._num_nodes(num_processes, num_nodes)

    def start(self, launch: Launch) -> ClusterHandle:
        """Submit the attempt, or take the one that is there."""
        num_nodes = self._num_nodes(launch.num_processes, launch.num_nodes)
        name = attempt_name(launch.marker)
        notes = Notes(launch.log_path)
        notes.begin(num_nodes=num_nodes)
        launch.log_path.touch()
        insist(lambda: self._cluster.submit(name, launch, num_nodes=num_nodes))
        return ClusterHandle(self._cluster, name, notes, pace_s=self._pace_s)

    def adopt(self, job_id: str, *, run_folder: Path) -> ClusterHandle | None:
        """Return the newest attempt if it is alive; end all others."""
        adopted: ClusterHandle | None = None
        names = insist(lambda: self._cluster.names(job_id))
        for name in sorted(names, key=_attempt_of, reverse=True):
            notes = Notes(run_folder / log_name(_attempt_of(name)))
            handle = ClusterHandle(self._cluster, name, notes, pace_s=self._pace_s)
            if adopted is None and notes.num_nodes() is not None and handle.is_alive():
                notes.renew()
                adopted = handle
            else:
                handle.end(grace_s=0)
        return adopted

    def _num_nodes(self, num_processes: int, num_nodes: int | None) -> int:
        return count_nodes(
            num_processes=num_processes,
            num_nodes=num_nodes,
            gpus_per_node=self._cluster.gpus_per_node,
        )


class ClusterHandle:
    """An attempt that was submitted."""

    def __init__(self, cluster: Cluster, name: str, notes: Notes, *, pace_s: float) -> None:
        self._cluster = cluster
        self._name = name
        self._notes = notes
        self._pace_s = pace_s
        self._next_look = 0.0
        self._gone_at: float | None = None
        self._is_silent = False

    def is_alive(self) -> bool:
        """Say whether it runs or waits for its turn."""
        sight = insist(lambda: self._cluster.look(self._name))
        return sight is not None and sight.stage is Stage.ALIVE

    def poll(self) -> Exit | None:
        """Return how it ended, as the scheduler and the nodes' own words say; None while neither knows."""
        now = time.monotonic()
        if now < self._next_look:
            return None
        self._next_look = now + self._pace_s
        self._renew()
        try:
            sight = self._cluster.look(self._name)
        except ClusterUnreachableError as error:
            # The ranks go on without it, and their events still come.
            self._warn(str(error))
            return None
        self._is_silent = False
        if sight is not None and sight.stage is Stage.ALIVE:
            self._gone_at = None
            return None
        self._gone_at = self._gone_at or now
        return self._judge(sight, has_settled=now - self._gone_at >= _SETTLE_S)

    def end(self, *, grace_s: float) -> None:
        """End every pod or step; whatever cannot be reached reads in the notes that it is over."""
        self._notes.give_up()
        insist(lambda: self._cluster.end(self._name, grace_s=grace_s))

    def _judge(self, sight: Sight | None, *, has_settled: bool) -> Exit | None:
        if sight is not None and sight.stage is Stage.SUCCEEDED:
            return Exit(status=0, killed=False, message=sight.message or "every node ended well")
        ends = self._notes.ends()
        num_nodes = self._notes.num_nodes() or 1
        if len(ends) < num_nodes and not has_settled:
            return None
        says = f"{self._name} is gone" if sight is None else sight.message
        return judge(ends, num_nodes=num_nodes, cluster_says=says)

    def _renew(self) -> None:
        try:
            self._notes.renew()
        except OSError as error:
            self._warn(f"{self._notes.folder} cannot be written: {error}")

    def _warn(self, message: str) -> None:
        if not self._is_silent:
            logger.warning("%s: %s", self._name, message)
            self._is_silent = True


def insist(call: Callable[[], Answer]) -> Answer:
    """Call again while the cluster does not answer, for a minute."""
    deadline = time.monotonic() + _INSIST_S
    while True:
        try:
            return call()
        except ClusterUnreachableError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_S)


def _attempt_of(name: str) -> int:
    return int(name.rpartition("-")[2])
