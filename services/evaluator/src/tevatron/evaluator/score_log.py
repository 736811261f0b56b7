"""Scores that a job has already, in an append-only file, so that a later attempt does not ask for them again.

A score is kept under the hash of what decides it: the scorer's identity and the pair's texts, never a file name or a
docid. One line is one chunk, synced before it counts; a line that a dying process tore is no line. Two attempts that
overlap may both append: they add the same scores.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from tevatron.core.contracts.scores import Candidate


class ScoreLog:
    """Scores by content; a context manager."""

    def __init__(self, path: Path, *, identity: str) -> None:
        """Read what there is at `path`; `identity` says what scores: a checkpoint with its arithmetic, a list of scorers."""
        self._identity = identity
        self._served = ""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._scores, self.num_torn_lines = _read(path)
        self._file = path.open("ab")
        if path.stat().st_size and not _ends_with_newline(path):
            self._file.write(b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._scores)

    def served_by(self, description: str) -> None:
        """Say how scores are made from now on: those that were made otherwise are not found any more."""
        self._served = description

    def key(self, candidate: Candidate) -> str:
        """Return the hash under which the pair's score is kept."""
        content = json.dumps(
            [self._identity, self._served, candidate.query, candidate.title, candidate.text]
        )
        return hashlib.sha256(content.encode()).hexdigest()[:32]

    def get(self, key: str) -> float | None:
        """Return the score, if there is one."""
        return self._scores.get(key)

    def append(self, scores: dict[str, float]) -> None:
        """Keep one chunk's scores; they are on disk when this returns."""
        line = json.dumps({"scores": scores}, allow_nan=False) + "\n"
        self._file.write(line.encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._scores.update(scores)


def _read(path: Path) -> tuple[dict[str, float], int]:
    scores: dict[str, float] = {}
    torn = 0
    if path.exists():
        with path.open("rb") as lines:
            for line in lines:
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                except ValueError:
                    torn += 1
                    continue
                scores.update(entry["scores"])
    return scores, torn


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
