"""What the watcher of a launch on a cluster and its nodes tell each other, through files on the shared volume.

Beside `attempt-N.log` lies the folder `attempt-N.nodes`. The watcher renews `watched` there: it is the ranks' lease, so
ranks that nobody watches any more, or that were given up, end although no scheduler tells them. Each node leaves how it
ended; a node that leaves no word is lost. Knows no scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ValidationError

from tevatron.trainer.launchers.base import Exit

_OVER = "over"


class Watch(StrEnum):
    """What a node reads of its watcher."""

    WATCHED = "watched"
    UNWATCHED = "unwatched"
    OVER = "over"


class NodeEnd(BaseModel):
    """How the ranks of one node ended."""

    time_s: float
    """Since the epoch, by the node's clock."""
    status: int | None
    """torchrun's exit status; None while the ranks still save, after the node was told to stop."""
    killed: bool = False
    """Whether a signal from outside ended torchrun or a rank first."""
    told: bool = False
    """Whether the node was told to stop: its end says nothing about the cause."""
    message: str = ""


class Notes:
    """The folder of one attempt."""

    def __init__(self, log_path: Path) -> None:
        self.log_path = log_path
        self.folder = log_path.with_suffix(".nodes")
        self._watched = self.folder / "watched"
        self._num_nodes = self.folder / "num_nodes"

    def begin(self, *, num_nodes: int) -> None:
        """Make the folder, watched from now on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _write(self._num_nodes, str(num_nodes))
        self.renew()

    def num_nodes(self) -> int | None:
        """Return how many nodes the attempt has; None where none was begun."""
        try:
            return int(self._num_nodes.read_text())
        except FileNotFoundError:
            return None

    def renew(self) -> None:
        """Say that somebody watches."""
        _write(self._watched, str(time.time_ns()))

    def give_up(self) -> None:
        """Say that the attempt is over: whoever reads it ends at once."""
        if self.folder.is_dir():
            _write(self._watched, _OVER)

    def read_watch(self) -> str:
        """Return what changes while somebody watches."""
        return self._watched.read_text()

    def node_log(self, node: int) -> Path:
        """Return where the output of a node's ranks goes."""
        return self.log_path if node == 0 else self.folder / f"node-{node}.log"

    def write_end(self, node: int, end: NodeEnd) -> None:
        """Leave how a node ended."""
        _write(self.folder / f"node-{node}.json", end.model_dump_json())

    def ends(self) -> dict[int, NodeEnd]:
        """Return how the nodes ended that have left a word."""
        found: dict[int, NodeEnd] = {}
        for path in self.folder.glob("node-*.json"):
            try:
                end = NodeEnd.model_validate_json(path.read_bytes())
            except ValidationError:
                continue  # Cut off by a full disk: as if it had left none.
            found[int(path.stem.removeprefix("node-"))] = end
        return found


class WatchReader:
    """Tells a node by its own clock whether anybody watches."""

    def __init__(self, notes: Notes, *, unwatched_s: float) -> None:
        self._notes = notes
        self._unwatched_s = unwatched_s
        self._last = ""
        self._changed_at = time.monotonic()

    def read(self) -> Watch:
        """Return what the file says now; one that cannot be read has not changed."""
        try:
            text = self._notes.read_watch()
        except OSError:
            text = self._last
        if text == _OVER:
            return Watch.OVER
        now = time.monotonic()
        if text != self._last:
            self._last, self._changed_at = text, now
        return Watch.WATCHED if now - self._changed_at < self._unwatched_s else Watch.UNWATCHED


def judge(ends: Mapping[int, NodeEnd], *, num_nodes: int, cluster_says: str = "") -> Exit:
    """Return how the attempt ended, by the first cause.

    Ranks that lose a sibling fail as well, so a lost node or a killed rank counts for more than a failing one. Nodes
    that were told to stop, as the scheduler does with the others once one has failed, say nothing.
    """
    silent = [node for node in range(num_nodes) if node not in ends]
    failed = sorted(
        ((node, end) for node, end in ends.items() if end.status not in (0, None) and not end.told),
        key=lambda item: item[1].time_s,
    )
    told = [node for node, end in ends.items() if end.told]
    words = [f"node {node} left no word" for node in silent]
    words += [f"node {node}: {end.message}" for node, end in failed[:1]]
    if not words and told:
        words.append(f"nodes {told} were told to stop")
    return Exit(
        status=0 if not (silent or failed or told) else 1,
        killed=bool(silent) or any(end.killed for _, end in failed) or (bool(told) and not failed),
        message="; ".join(word for word in (cluster_says, *words) if word)
        or "every node ended well",
    )


def _write(path: Path, text: str) -> None:
    half = path.with_name(f"{path.name}.tmp")
    half.write_text(text, encoding="utf-8")
    half.replace(path)
