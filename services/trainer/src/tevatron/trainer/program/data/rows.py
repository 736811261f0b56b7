"""The checked rows of a run, in a file of their own beside the run, where each can be read by its number.

Rank 0 reads and checks the whole dataset once, before any model loads; every error names file and line. What passed is
written into the run folder, so that ranks hold none of it in memory and a compressed file is unpacked once.
"""

from __future__ import annotations

import json
import shutil
from array import array
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from tevatron.core.errors import FormatError, QueryTooLongError
from tevatron.core.formats.files import sha256_file
from tevatron.core.formats.training import Passage, TrainingRow, read_numbered
from tevatron.core.prompts import Pair, Renderer

DATA_NAME = "data"
_ROWS, _OFFSETS, _SUMMARY = "rows.jsonl", "offsets.bin", "summary.json"


_TIGHT = 64
"""Tokens for a passage below which every passage of a row is tried: no character takes so many."""


class Demands(NamedTuple):
    """What a row must offer to this run."""

    group_size: int
    needs_teacher: bool


class Summary(BaseModel):
    """What was checked, so that a resumed run need not do it again."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset_sha256: str
    checked_for: str
    """The prompt and the demands of the check, as text."""
    num_rows: int


class RowFile:
    """Reads checked rows by number; open in every process that draws groups."""

    def __init__(self, run_dir: Path) -> None:
        folder = run_dir / DATA_NAME
        self.summary = Summary.model_validate_json((folder / _SUMMARY).read_bytes())
        self._offsets = array("Q")
        self._offsets.frombytes((folder / _OFFSETS).read_bytes())
        self._path = folder / _ROWS

    def __len__(self) -> int:
        return self.summary.num_rows

    def __getitem__(self, index: int) -> TrainingRow:
        start, end = self._offsets[index], self._offsets[index + 1]
        # Opened anew each time: a shared position would mix up the loader's worker processes.
        with self._path.open("rb") as stream:
            stream.seek(start)
            query_id, query, positives, negatives = json.loads(stream.read(end - start))
        return TrainingRow(
            query_id,
            query,
            [Passage(*one) for one in positives],
            [Passage(*one) for one in negatives],
        )


def prepare_rows(dataset: Path, run_dir: Path, *, renderer: Renderer, demands: Demands) -> RowFile:
    """Check every row of the dataset and write them beside the run, unless that is done already."""
    sha256 = sha256_file(dataset) if dataset.is_file() else ""
    checked_for = _checked_for(renderer, demands)
    folder = run_dir / DATA_NAME
    if (folder / _SUMMARY).is_file():
        found = RowFile(run_dir)
        if (found.summary.dataset_sha256, found.summary.checked_for) == (sha256, checked_for):
            return found
    beside = run_dir / f"{DATA_NAME}.tmp"
    for old in (beside, folder):
        shutil.rmtree(old, ignore_errors=True)
    beside.mkdir(parents=True)
    num_rows = _write(dataset, beside, renderer=renderer, demands=demands)
    if num_rows == 0:
        raise FormatError("expected at least one training row, got none", path=dataset)
    summary = Summary(dataset_sha256=sha256, checked_for=checked_for, num_rows=num_rows)
    (beside / _SUMMARY).write_text(summary.model_dump_json(), encoding="utf-8")
    beside.rename(folder)
    return RowFile(run_dir)


def _checked_for(renderer: Renderer, demands: Demands) -> str:
    return repr(
        (
            renderer.template.name,
            renderer.template.version,
            renderer.query_prefix,
            renderer.passage_prefix,
            renderer.append_eos,
            renderer.max_length,
            renderer.answer_ids,
            demands,
        )
    )


def _write(dataset: Path, folder: Path, *, renderer: Renderer, demands: Demands) -> int:
    offsets = array("Q", [0])
    with (folder / _ROWS).open("wb") as stream:
        for line, row in read_numbered(dataset):
            check_row(row, path=dataset, line=line, renderer=renderer, demands=demands)
            text = json.dumps([row.query_id, row.query, row.positives, row.negatives])
            stream.write(text.encode() + b"\n")
            offsets.append(stream.tell())
    (folder / _OFFSETS).write_bytes(offsets.tobytes())
    return len(offsets) - 1


def check_row(
    row: TrainingRow, *, path: Path, line: int, renderer: Renderer, demands: Demands
) -> None:
    """Raise `FormatError` where the row cannot give a group, or its query leaves no room for a passage."""
    if demands.group_size > 1 and not row.negatives:
        raise FormatError(
            f"query '{row.query_id}' has no negative passage, train_group_size {demands.group_size} needs at least one",
            path=path,
            line=line,
            field="negative_passages",
        )
    if demands.needs_teacher and not row.has_teacher_scores:
        raise FormatError(
            f"query '{row.query_id}' has passages without a teacher's score, which this loss needs",
            path=path,
            line=line,
            field="scores",
        )
    try:
        shortest = renderer.render(Pair(query=row.query, text="a"))
        if renderer.max_length - len(shortest.ids) < _TIGHT:
            # Whether anything is left of a passage depends on its first character, which may be several tokens.
            passages = (*row.positives, *row.negatives)
            renderer.render_all(
                [Pair(query=row.query, title=p.title, text=p.text) for p in passages]
            )
    except QueryTooLongError as error:
        raise FormatError(str(error), path=path, line=line, field="query") from error
