"""Entry of one node of a launch on a cluster: `python -m tevatron.trainer.launchers.node [OPTIONS] MODULE [ARGUMENT...]`.

Owns the way from what a cluster says in the environment to torchrun's command line, and the life of that torchrun:
SIGTERM reaches the ranks, and with `--log` the notes on the shared volume are kept. Ranks meet by static rendezvous at
the first node's address: with c10d no node believes to be the host where a host's name is not its address.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from tevatron.core.errors import ConfigError
from tevatron.core.logging import configure_logging
from tevatron.core.process import ATTEMPT_VARIABLE, guarded
from tevatron.trainer.launchers.notes import NodeEnd, Notes, Watch, WatchReader
from tevatron.trainer.launchers.torchrun import (
    SHUTDOWN_MARGIN_S,
    ask_ranks_to_stop,
    num_threads,
    read_log,
    torchrun_end,
    torchrun_variables,
)

logger = logging.getLogger(__name__)

RANKS_VARIABLE = "PET_NPROC_PER_NODE"
_POLL_S = 0.2
_READ_WATCH_S = 5.0
_MEET_S = 3600
"""How long the nodes wait for one another: a scheduler may start them one by one."""
_TOLD_STATUS = 143


class Place(NamedTuple):
    """Which node of how many this is, and where the first one is."""

    num_nodes: int
    rank: int
    address: str
    port: int


def read_place(environment: Mapping[str, str]) -> Place:
    """Return this node's place by the variables of torchrun (PET_*), a LeaderWorkerSet (LWS_*) or Slurm (SLURM_*).

    Without any of them it is the only node. Slurm does not say where the first node is: MASTER_ADDR does, which our
    sbatch file sets.
    """
    port = environment.get("MASTER_PORT", "29500")
    if "PET_NNODES" in environment:
        names = ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR")
        port = environment.get("PET_MASTER_PORT", port)
    elif "LWS_GROUP_SIZE" in environment:
        names = ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS")
    elif "SLURM_NNODES" in environment:
        names = ("SLURM_NNODES", "SLURM_NODEID", "MASTER_ADDR")
    else:
        return Place(1, 0, "127.0.0.1", int(port))
    missing = [name for name in names if name not in environment]
    if missing:
        raise ConfigError(
            f"{names[0]}={environment[names[0]]}: expected {missing[0]} beside it, got nothing"
        )
    num_nodes, rank, address = (environment[name] for name in names)
    return Place(int(num_nodes), int(rank), address, int(port))


def torchrun_arguments(place: Place, *, ranks_per_node: int) -> list[str]:
    """Return torchrun's options for a node at this place."""
    if place.num_nodes == 1:
        # A free port each time: two launches on one node do not meet.
        how = ["--standalone", "--local-addr", "127.0.0.1"]
    else:
        how = [
            *("--nnodes", str(place.num_nodes)),
            *("--node-rank", str(place.rank)),
            *("--master-addr", place.address),
            *("--master-port", str(place.port)),
            *("--rdzv-conf", f"timeout={_MEET_S}"),
        ]
    return [*how, "--nproc-per-node", str(ranks_per_node)]


class Node:
    """torchrun on this node, from its start to its end."""

    def __init__(self, place: Place, options: argparse.Namespace) -> None:
        self._place = place
        self._ranks: int = options.ranks_per_node
        self._stop_grace_s: float = options.stop_grace_s
        self._program: list[str] = [options.module, *options.arguments]
        self._marker = os.environ.get(ATTEMPT_VARIABLE, f"node:{os.getpid()}")
        self._notes = None if options.log is None else Notes(options.log)
        self._reader = (
            None
            if self._notes is None
            else WatchReader(self._notes, unwatched_s=options.unwatched_s)
        )
        self._signalled = False
        self._told_at: float | None = None
        self._log_start = 0

    def run(self) -> int:
        """Run torchrun to its end; return the exit status of this node."""
        signal.signal(signal.SIGTERM, self._on_signal)
        with tempfile.TemporaryDirectory(
            prefix="tevatron-torchrun-", ignore_cleanup_errors=True
        ) as folder:
            status = self._wait(self._start(Path(folder)))
        self._note_end(status)
        return status if status >= 0 else 128 - status

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        read_watch_at = 0.0
        while (status := process.poll()) is None:
            time.sleep(_POLL_S)
            now = time.monotonic()
            watch = Watch.WATCHED
            if self._reader is not None and now >= read_watch_at:
                read_watch_at = now + _READ_WATCH_S
                watch = self._reader.read()
            if watch is Watch.OVER or self._has_had_time(now):
                process.kill()  # The ranks die with it.
            elif self._told_at is None and (self._signalled or watch is Watch.UNWATCHED):
                self._tell(process, why="SIGTERM" if self._signalled else "nobody watches")
        return status

    def _start(self, ranks_folder: Path) -> subprocess.Popen[bytes]:
        argv = [
            *(sys.executable, "-m", "torch.distributed.run"),
            # torchrun would leave a folder of its own behind.
            *("--log-dir", str(ranks_folder)),
            *torchrun_arguments(self._place, ranks_per_node=self._ranks),
            *("-m", *self._program),
        ]
        environment = {
            **os.environ,
            **torchrun_variables(stop_grace_s=self._stop_grace_s),
            ATTEMPT_VARIABLE: self._marker,
        }
        environment.setdefault("OMP_NUM_THREADS", num_threads(num_ranks=self._ranks))
        if self._place.num_nodes == 1:
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        logger.info("node %d of %d: %s", self._place.rank, self._place.num_nodes, " ".join(argv))
        if self._notes is None:
            return subprocess.Popen(guarded(argv), env=environment, start_new_session=True)
        path = self._notes.node_log(self._place.rank)
        logger.info("its output goes to %s", path)
        with path.open("ab") as log:
            self._log_start = log.tell()
            return subprocess.Popen(
                guarded(argv),
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._signalled = True

    def _has_had_time(self, now: float) -> bool:
        limit_s = self._stop_grace_s + SHUTDOWN_MARGIN_S
        return self._told_at is not None and now - self._told_at > limit_s

    def _tell(self, process: subprocess.Popen[bytes], *, why: str) -> None:
        logger.warning("told to stop (%s): the ranks save their state", why)
        self._told_at = time.monotonic()
        # First: whoever told may kill this process before the ranks have ended.
        self._write_end(NodeEnd(time_s=time.time(), status=None, told=True))
        ask_ranks_to_stop(process.pid, marker=self._marker)

    def _note_end(self, status: int) -> None:
        if self._notes is None:
            return
        log = self._notes.node_log(self._place.rank)
        ended = torchrun_end(status, read_log(log, start=self._log_start))
        self._write_end(
            NodeEnd(
                time_s=time.time(),
                status=status,
                killed=ended.killed,
                told=self._told_at is not None,
                message=ended.message,
            )
        )

    def _write_end(self, end: NodeEnd) -> None:
        if self._notes is not None:
            self._notes.write_end(self._place.rank, end)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="tevatron.trainer.launchers.node", description=__doc__)
    ranks = os.environ.get(RANKS_VARIABLE)
    parser.add_argument("--ranks-per-node", type=int, default=ranks, required=ranks is None)
    parser.add_argument("--log", type=Path, help="the attempt's log; its notes lie beside it")
    parser.add_argument("--unwatched-s", type=float, default=900.0)
    parser.add_argument("--stop-grace-s", type=float, default=60.0)
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    configure_logging("trainer-node")
    try:
        place = read_place(os.environ)
    except ConfigError as error:
        logger.error("%s", error)
        return 2
    return Node(place, options).run()


if __name__ == "__main__":
    sys.exit(main())
