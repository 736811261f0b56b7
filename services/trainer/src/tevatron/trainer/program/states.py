"""Resumable states under states/step-<N>: which are whole, which is newest, how one is made and old ones go.

A state has its name only when every byte of it is on disk: it is written beside, synced, then renamed. What a killed
save leaves behind has another name and is removed by the next one. Knows no tensors.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tevatron.core.contracts.run import STATES_NAME
from tevatron.core.errors import ConfigError

_NAME = re.compile(r"step-(\d+)")
_BESIDE = ".tmp"


class State(NamedTuple):
    """A whole state."""

    step: int
    folder: Path


def list_states(run_dir: Path) -> list[State]:
    """Return the whole states of a run, oldest first."""
    folder = run_dir / STATES_NAME
    if not folder.is_dir():
        return []
    found = [
        State(int(match[1]), path)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir()
    ]
    return sorted(found)


def newest_state(run_dir: Path) -> State | None:
    """Return the state to go on from, None where there is none."""
    states = list_states(run_dir)
    return states[-1] if states else None


def find_state(run_dir: Path, step: int | None) -> State:
    """Return the state of that step, the newest without one; `ConfigError` names those that are there."""
    states = list_states(run_dir)
    for state in reversed(states):
        if step is None or state.step == step:
            return state
    there = ", ".join(str(state.step) for state in states) or "none"
    wanted = "a saved state" if step is None else f"a saved state of step {step}"
    raise ConfigError(f"{run_dir.name} does not have {wanted}; there are: {there}")


def begin_state(run_dir: Path, step: int) -> Path:
    """Return an empty folder to write the state of a step into; one rank calls this before any writes."""
    states = run_dir / STATES_NAME
    states.mkdir(parents=True, exist_ok=True)
    for left in states.glob(f"*{_BESIDE}"):
        shutil.rmtree(left)
    folder = beside(run_dir, step)
    folder.mkdir()
    return folder


def beside(run_dir: Path, step: int) -> Path:
    """Return where the state of a step is written before it is whole."""
    return run_dir / STATES_NAME / f"step-{step}{_BESIDE}"


def commit_state(run_dir: Path, step: int, *, keep: int, best: int | None = None) -> State:
    """Sync and name the state, then remove all but the newest `keep`; one rank calls this after all wrote.

    Args:
        run_dir: Folder of the run.
        step: Whose state it is.
        keep: How many of the newest are kept.
        best: The step whose state is kept beside them, as this state has it.
    """
    folder = run_dir / STATES_NAME / f"step-{step}"
    if folder.is_dir():
        # Trained again after a resume from an older state: the new one takes its place.
        shutil.rmtree(folder)
    publish_folder(beside(run_dir, step), folder)
    for state in list_states(run_dir)[:-keep]:
        if state.step != best:
            shutil.rmtree(state.folder)
    return State(step, folder)


def publish_folder(written: Path, name: Path) -> None:
    """Sync every file of a folder to disk, then give it its name."""
    for path in _walk(written):
        with _opened(path) as descriptor:
            os.fsync(descriptor)
    written.rename(name)
    with _opened(name.parent) as descriptor:
        os.fsync(descriptor)


def _walk(folder: Path) -> Iterator[Path]:
    yield from folder.rglob("*")
    yield folder


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
