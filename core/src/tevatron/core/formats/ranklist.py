"""Ranked lists: `query_id docid score`, or TREC's `query_id Q0 docid rank score tag`; tabs or blanks.

Scores decide the order, ranks are not looked at (many tools write 0). Knows no metric.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tevatron.core.errors import FormatError
from tevatron.core.formats.files import read_lines

Run = dict[str, dict[str, float]]
"""Scores by query and document."""


def split_columns(text: str) -> list[str]:
    """Split at blanks and tabs only: an id may contain other white space, such as a no-break space."""
    if text.isascii():
        return text.split()
    return [column.decode() for column in text.encode().split()]


def can_be_column(text: str) -> bool:
    """Say whether an id can stand in a run or in qrels, whose columns are parted by blanks or tabs."""
    return split_columns(text) == [text]


def read_columns(path: Path | str, *, forms: Mapping[int, str]) -> Iterator[tuple[int, list[str]]]:
    """Yield numbered lines as columns: as many as a form has, and in every line as many as in the first.

    Args:
        path: A file of lines.
        forms: What each number of columns that is allowed is called.
    """
    # A blank within an id may make a line of one form look like one of another.
    width = None
    for number, text in read_lines(path):
        columns = split_columns(text)
        if len(columns) not in forms:
            expected = " or ".join(forms.values())
            raise FormatError(f"expected {expected}, got {len(columns)}", path=path, line=number)
        width = width or len(columns)
        if len(columns) != width:
            message = f"expected {forms[width]} as in the lines before, got {len(columns)}"
            raise FormatError(message, path=path, line=number)
        yield number, columns


class Row(NamedTuple):
    """One line of a run, and its number from 1."""

    line: int
    query_id: str
    docid: str
    score: float


class RunSize(NamedTuple):
    """How much a run holds."""

    queries: int
    rows: int


def read_ranklist(path: Path | str) -> Run:
    """Read a run, plain or compressed; a score that is no finite number or a document given twice is an error."""
    run: Run = {}
    for row in _rows(path):
        documents = run.setdefault(row.query_id, {})
        if row.docid in documents:
            raise _given_twice(row, path)
        documents[row.docid] = row.score
    return run


def check_ranklist(path: Path | str) -> RunSize:
    """Read a run as `read_ranklist` does, and keep only one query's documents where its lines stand together."""
    queries: set[str] = set()
    documents: set[str] = set()
    query_id, num_rows = None, 0
    for row in _rows(path):
        if row.query_id != query_id:
            if row.query_id in queries:
                # Scattered: a document given twice may be anywhere.
                run = read_ranklist(path)
                return RunSize(len(run), sum(map(len, run.values())))
            query_id = row.query_id
            queries.add(query_id)
            documents.clear()
        if row.docid in documents:
            raise _given_twice(row, path)
        documents.add(row.docid)
        num_rows += 1
    return RunSize(len(queries), num_rows)


def _rows(path: Path | str) -> Iterator[Row]:
    for number, columns in read_columns(
        path, forms={3: "3 columns (query_id docid score)", 6: "TREC's 6"}
    ):
        query_id, docid, written = columns if len(columns) == 3 else columns[:5:2]
        try:
            score = float(written)
        except ValueError:
            raise FormatError(
                f"expected a number, got '{written}'", path=path, line=number, field="score"
            ) from None
        if not math.isfinite(score):
            raise FormatError(
                f"expected a finite number, got {score}", path=path, line=number, field="score"
            )
        yield Row(number, query_id, docid, score)


def _given_twice(row: Row, path: Path | str) -> FormatError:
    message = f"document '{row.docid}' is given twice for query '{row.query_id}'"
    return FormatError(message, path=path, line=row.line, field="docid")


def write_ranklist(
    path: Path | str, run: Mapping[str, Mapping[str, float]], *, trec: bool = False
) -> None:
    """Write a run, best first, scores in full precision.

    Ties, also those of float32, go by document id descending: the order of trec_eval and of our metrics, so that whoever
    cuts the file by its lines keeps the same documents.

    An id with white space would read back as two columns, and a score that is not finite not at all: both are errors.
    """
    with Path(path).open("w", encoding="utf-8", newline="\n") as stream:
        for query_id, documents in run.items():
            _check_id(query_id, path, "query_id")
            singles = array("f", documents.values())
            ordered = sorted(zip(singles, documents, strict=True), reverse=True)
            for rank, (_, docid) in enumerate(ordered, start=1):
                score = documents[docid]
                _check_id(docid, path, "docid")
                if not math.isfinite(score):
                    message = f"score of query '{query_id}', document '{docid}' is {score}"
                    raise FormatError(message, path=path, field="score")
                if trec:
                    stream.write(f"{query_id} Q0 {docid} {rank} {score!r} tevatron\n")
                else:
                    stream.write(f"{query_id}\t{docid}\t{score!r}\n")


def _check_id(text: str, path: Path | str, field: str) -> None:
    if not can_be_column(text):
        raise FormatError(
            f"an id cannot be empty or contain white space, got {text!r}", path=path, field=field
        )
