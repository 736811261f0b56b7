"""Teacher annotation: a training file in, the reference's distillation rows out, one for each row and in its order.

A row is `query_id, query, passages, scores`: all positives first, then negatives, and the teacher's raw log-odds for each
(`num_positives` says how many of the passages are positive; the reference knows one). Rows are written as soon as they and
those before them are scored, so that whoever is killed goes on at the first row that is not there. Rows are told apart by
their place: two of the same query id are two rows. Knows files and the pool, not jobs.
"""

from __future__ import annotations

import json
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from pydantic import JsonValue, ValidationError

from tevatron.core.contracts.scores import Candidate
from tevatron.core.errors import ConfigError, InputError
from tevatron.core.formats.files import sha256_file
from tevatron.core.formats.training import Passage, read_numbered
from tevatron.evaluator.files import whole_file
from tevatron.evaluator.pool import Backends, PoolOptions, stream_scores
from tevatron.evaluator.served import Served

OUTPUT_NAME = "annotated.jsonl"
PART_NAME = "annotated.jsonl.part"
STATE_NAME = "annotate.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnnotateOptions:
    """Which passages of which rows are scored."""

    max_negatives: int = 15
    shuffle_negatives: bool = False
    seed: int = 42
    limit: int | None = None


class Source(NamedTuple):
    """A training file, read once from end to end."""

    path: Path
    sha256: str
    num_rows: int
    """Rows that are annotated."""
    num_duplicate_ids: int
    """Rows whose query id an earlier one has."""


class _Row(NamedTuple):
    line: int
    query_id: str
    query: str
    passages: list[Passage]
    num_positives: int


class _Place(NamedTuple):
    """A passage of a row that is being scored."""

    row: _OpenRow
    passage: int


class _OpenRow:
    def __init__(self, row: _Row) -> None:
        self.row = row
        self.scores: list[float | None] = [None] * len(row.passages)
        self.num_missing = len(row.passages)


def read_source(path: Path, options: AnnotateOptions) -> Source:
    """Read the file, so that a fault is found before anything is scored."""
    seen: set[str] = set()
    num_rows = num_duplicates = 0
    for _, row in islice(read_numbered(path), options.limit):
        num_rows += 1
        num_duplicates += row.query_id in seen
        seen.add(row.query_id)
    if num_rows == 0:
        raise InputError(f"{path}: expected rows to annotate, got none")
    return Source(path, sha256_file(path), num_rows, num_duplicates)


def is_annotated(folder: Path, source: Source, options: AnnotateOptions) -> bool:
    """Say whether the folder holds the finished annotation of this source with these options."""
    return (folder / OUTPUT_NAME).is_file() and _state_without_teacher(
        _read_state(folder)
    ) == _state_without_teacher(_state(source, options, teacher=""))


def annotate(
    source: Source,
    folder: Path,
    backends: Backends,
    *,
    served: Served,
    options: AnnotateOptions,
    pool: PoolOptions | None = None,
    check: Callable[[], None] = lambda: None,
    on_progress: Callable[[int], None] = lambda num_rows: None,
) -> Path:
    """Annotate what is not annotated yet, and return the finished file.

    Args:
        folder: Where the output and its state lie; what an earlier call left of the same work is continued.
        served: What the backends serve.
        on_progress: Called with the number of rows that are written.

    Raises:
        ConfigError: the folder holds something else, or the work of another teacher.
    """
    state = _state(source, options, teacher=served.identity)
    _check_state(folder, state)
    output, part = folder / OUTPUT_NAME, folder / PART_NAME
    if output.is_file():
        return output
    with whole_file(folder / STATE_NAME) as path:
        path.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    with _RowWriter(part, on_progress) as writer:
        on_progress(writer.num_written)
        rows = islice(_rows(source.path, options), writer.num_written, None)
        stream_scores(
            backends,
            _pairs(rows, writer),
            writer.put,
            served=served,
            options=pool,
            check=check,
        )
    if writer.num_written != source.num_rows:
        raise InputError(
            f"{source.path} changed while it was annotated: {source.num_rows} rows at first, {writer.num_written} in the end"
        )
    part.replace(output)
    return output


def has_other_teacher(folder: Path, served: Served) -> bool:
    """Say whether the folder holds rows of another teacher than what is served now."""
    state = _read_state(folder)
    return state is not None and state.get("teacher") != served.identity


def describe_duplicates(source: Source) -> str:
    """Say how many rows share a query id."""
    return (
        f"{source.num_duplicate_ids} of {source.num_rows} rows have the query id of an earlier row; each is annotated by "
        "itself"
    )


def forget(folder: Path) -> None:
    """Remove what an earlier call left, so that another teacher can begin."""
    for name in (OUTPUT_NAME, PART_NAME, STATE_NAME):
        (folder / name).unlink(missing_ok=True)


def _rows(path: Path, options: AnnotateOptions) -> Iterator[_Row]:
    for line, row in islice(read_numbered(path), options.limit):
        negatives = row.negatives
        if options.shuffle_negatives and len(negatives) > options.max_negatives:
            # By its place, so that a row draws the same however often the work is begun again.
            draw = random.Random(f"{options.seed}:{line}")
            places = sorted(draw.sample(range(len(negatives)), options.max_negatives))
            negatives = [negatives[place] for place in places]
        passages = [*row.positives, *negatives[: options.max_negatives]]
        yield _Row(line, row.query_id, row.query, passages, len(row.positives))


def _pairs(rows: Iterator[_Row], writer: _RowWriter) -> Iterator[tuple[_Place, Candidate]]:
    for row in rows:
        opened = writer.open(row)
        for place, passage in enumerate(row.passages):
            try:
                candidate = Candidate(
                    query_id=row.query_id,
                    docid=f"{row.line}#{place}",
                    query=row.query,
                    title=passage.title,
                    text=passage.text,
                )
            except ValidationError as error:
                raise InputError(
                    f"line {row.line}, query '{row.query_id[:100]}' cannot be sent to a scorer: "
                    f"{error.errors(include_url=False)[0]['msg']}"
                ) from error
            yield _Place(opened, place), candidate


class _RowWriter:
    """Appends finished rows in their order; a context manager."""

    def __init__(self, path: Path, on_progress: Callable[[int], None]) -> None:
        """Continue the file at `path` after its last whole line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self.num_written = self._cut_torn_line()
        self._on_progress = on_progress
        self._open: deque[_OpenRow] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def open(self, row: _Row) -> _OpenRow:
        """Expect the scores of one more row."""
        self._open.append(_OpenRow(row))
        return self._open[-1]

    def put(self, places: Sequence[_Place], scores: Sequence[float]) -> None:
        """Take scores, and write the rows that are complete up to the first one that is not."""
        for (row, passage), score in zip(places, scores, strict=True):
            row.scores[passage] = score
            row.num_missing -= 1
        before = self.num_written
        while self._open and self._open[0].num_missing == 0:
            self._file.write(_line(self._open.popleft()))
            self.num_written += 1
        if self.num_written > before:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._on_progress(self.num_written)

    def _cut_torn_line(self) -> int:
        self._file.seek(0)
        num_lines = end = 0
        for line in self._file:
            if line.endswith(b"\n"):
                num_lines += 1
                end += len(line)
        self._file.truncate(end)
        self._file.seek(end)
        return num_lines


def _line(opened: _OpenRow) -> bytes:
    row = opened.row
    content: dict[str, JsonValue] = {
        "query_id": row.query_id,
        "query": row.query,
        "passages": [_passage(passage) for passage in row.passages],
        "scores": list(opened.scores),
        "num_positives": row.num_positives,
    }
    return (json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _passage(passage: Passage) -> dict[str, JsonValue]:
    fields: dict[str, JsonValue] = {"title": passage.title, "text": passage.text}
    return fields if passage.docid is None else {"docid": passage.docid, **fields}


def _state(source: Source, options: AnnotateOptions, *, teacher: str) -> dict[str, JsonValue]:
    return {"source_sha256": source.sha256, **asdict(options), "teacher": teacher}


def _state_without_teacher(state: dict[str, JsonValue] | None) -> dict[str, JsonValue] | None:
    return None if state is None else {key: state[key] for key in state if key != "teacher"}


def _read_state(folder: Path) -> dict[str, JsonValue] | None:
    path = folder / STATE_NAME
    if not path.is_file():
        return None
    try:
        state = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not the state of an annotation: {error}") from error
    if not isinstance(state, dict):
        raise ConfigError(f"{path} is not the state of an annotation: expected an object")
    return state


def _check_state(folder: Path, state: dict[str, JsonValue]) -> None:
    """Refuse a folder that holds other work."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    before = _read_state(folder)
    if before is None:
        raise ConfigError(
            f"{folder} is not empty and holds no annotation: expected an empty folder, or one that this very work was "
            "begun in"
        )
    for name, value in state.items():
        if before.get(name) != value:
            raise ConfigError(
                f"{folder} holds the annotation of other work: {name} is {before.get(name)!r} there and {value!r} now"
            )
