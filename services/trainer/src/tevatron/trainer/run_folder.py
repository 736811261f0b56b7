"""The run folder as the worker sees it: where things lie, what is whole, and what an attempt left half-done.

Knows nothing of jobs or processes. Its content is described in `tevatron.core.contracts.run`.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from tevatron.core.contracts.checkpoint import read_contract
from tevatron.core.contracts.run import (
    CANCEL_NAME,
    CONFIG_NAME,
    EVENTS_NAME,
    EXPORT_NAME,
    FINISH_NAME,
    SAVE_NAME,
    STATES_NAME,
    log_name,
)
from tevatron.core.errors import ContractError

_STATE = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Folder of one job."""

    path: Path

    @property
    def config(self) -> Path:
        """Input of the program."""
        return self.path / CONFIG_NAME

    @property
    def events(self) -> Path:
        """What the program says."""
        return self.path / EVENTS_NAME

    @property
    def export(self) -> Path:
        """The published form, whole when it has this name."""
        return self.path / EXPORT_NAME

    @property
    def cancel(self) -> Path:
        """Its presence turns SIGTERM into 'end at once'."""
        return self.path / CANCEL_NAME

    @property
    def save(self) -> Path:
        """Its presence asks the ranks for a state."""
        return self.path / SAVE_NAME

    @property
    def finish(self) -> Path:
        """Its presence makes the step that the ranks are at their last one."""
        return self.path / FINISH_NAME

    def log(self, attempt: int) -> Path:
        """Return where the output of an attempt's processes goes."""
        return self.path / log_name(attempt)

    def share_log(self, attempt: int) -> None:
        """Give the newest log this attempt's name too: what it adopted goes on writing there."""
        logs = (self.log(earlier) for earlier in range(attempt - 1, 0, -1))
        newest = next((log for log in logs if log.exists()), None)
        if newest is not None and not self.log(attempt).exists():
            os.link(newest, self.log(attempt))

    def prepare(self, config: BaseModel) -> None:
        """Make the folder ready for an attempt: no leftovers of the last one, and the program's input."""
        self.path.mkdir(parents=True, exist_ok=True)
        for request in (self.cancel, self.save, self.finish):
            request.unlink(missing_ok=True)
        self.remove_half_done()
        half = self.config.with_name(f"{CONFIG_NAME}.tmp")
        half.write_text(config.model_dump_json(indent=2) + "\n", encoding="utf-8")
        half.replace(self.config)

    def saved_steps(self) -> list[int]:
        """Return the steps of the complete training states, in ascending order."""
        states = self.path / STATES_NAME
        if not states.is_dir():
            return []
        found = (_STATE.fullmatch(entry.name) for entry in states.iterdir() if entry.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def remove_half_done(self) -> None:
        """Remove exports and states that were never finished."""
        states = self.path / STATES_NAME
        half_states = [
            entry
            for entry in (states.iterdir() if states.is_dir() else ())
            if not _STATE.fullmatch(entry.name)
        ]
        for entry in [*self.path.glob(f"{EXPORT_NAME}?*"), *half_states]:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()


def is_checkpoint(folder: Path) -> bool:
    """Say whether a folder holds a whole checkpoint: a readable contract and weights.

    Exports come to their name by a rename, so a folder that has the name is whole unless somebody changed it.
    """
    if not folder.is_dir() or not any(folder.glob("*.safetensors")):
        return False
    try:
        return read_contract(folder) is not None
    except ContractError:
        return False


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder`, and itself, to the disk."""
    for place, _, names in os.walk(folder):
        for path in [*(Path(place) / name for name in names), Path(place)]:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
