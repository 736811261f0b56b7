"""Ranked lists: `query_id docid score`, or TREC's `query_id Q0 docid rank score tag`; tabs or blanks.

Scores decide the order, ranks are not looked at (many tools write 0). Knows no metric.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tevatron.core.errors import FormatError
from tevatron.core.formats.files import read_blocks

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


class RunSize(NamedTuple):
    """How much a run holds."""

    queries: int
    rows: int


def read_ranklist(path: Path | str) -> Run:
    """Read a run, plain or compressed.

    Raises:
        FormatError: A line has other columns than these, or not as many as the first one; a score that is no number; a
            document is given twice for a query; or the third of 3 columns counts 1, 2, 3, ... as MS MARCO's runs do,
            which hold ranks and no scores.
    """
    run: Run = {}
    counts = [_counts_up(documents, width) for _, documents, width in _stretches(path, run)]
    _refuse_ranks(counts, path)
    return run


def check_ranklist(path: Path | str) -> RunSize:
    """Read a run as `read_ranklist` does, and keep only one query's documents where its lines stand together."""
    kept: Run = {}
    counts: dict[str, bool | None] = {}
    num_rows = 0
    for query_id, documents, width in _stretches(path, kept):
        if query_id in counts:
            # Scattered: a document given twice may be anywhere.
            run = read_ranklist(path)
            return RunSize(len(run), sum(map(len, run.values())))
        counts[query_id] = _counts_up(documents, width)
        num_rows += len(documents)
        del kept[query_id]
    _refuse_ranks(counts.values(), path)
    return RunSize(len(counts), num_rows)


def _stretches(path: Path | str, run: Run) -> Iterator[tuple[str, dict[str, float], int]]:
    """Read lines into `run`; at the end of each stretch of one query yield it, its documents and the line's columns."""
    width, last = -1, None
    documents: dict[str, float] = {}
    for block in read_blocks(path):
        # Runs have millions of lines: no call and no object a line that is not needed.
        split = str.split if block.is_ascii else split_columns
        for number, text in enumerate(block.lines, start=block.number):
            columns = split(text)
            # trec_eval takes all that is left of a line as the tag, which may have blanks in it.
            columns_6 = len(columns) if len(columns) < 6 else 6
            if columns_6 != width:
                if not columns:
                    continue
                _check_width(len(columns), width, path, number)
                width = columns_6
            if width == 6:
                query_id, docid, written = columns[0], columns[2], columns[4]
            else:
                query_id, docid, written = columns
            if query_id != last:
                if last is not None:
                    yield last, documents, width
                documents = run.setdefault(query_id, {})
                last = query_id
            score = _number(written)
            if score != score or docid in documents:
                raise _fault(columns, written, path, number)
            documents[docid] = score
    if last is not None:
        yield last, documents, width


def _check_width(width: int, first: int, path: Path | str, number: int) -> None:
    expected = "3 columns (query_id docid score) or TREC's 6"
    is_form = width == 3 or width >= 6
    if first > 0 and is_form:
        # A blank within an id makes a line of one form look like one of another.
        expected = f"{first} columns as in the lines before"
    if first > 0 or not is_form:
        raise FormatError(f"expected {expected}, got {width}", path=path, line=number)


def _number(written: str) -> float:
    """Return a score, NaN where it is none."""
    try:
        return float(written)
    except ValueError:
        return math.nan


def _fault(columns: list[str], written: str, path: Path | str, number: int) -> FormatError:
    """Say what is wrong with a line: its score, else that its document was there before."""
    query_id, docid = columns[0], columns[2 if len(columns) >= 6 else 1]
    if math.isnan(_number(written)):
        message = f"the score of document '{docid}' of query '{query_id}' is NaN, which has no place in a ranking"
        if written.lower().lstrip("+-") != "nan":
            message = f"expected a number, got '{written}'"
        return FormatError(message, path=path, line=number, field="score")
    message = f"document '{docid}' is given twice for query '{query_id}'"
    return FormatError(message, path=path, line=number, field="docid")


def _counts_up(documents: Mapping[str, float], width: int) -> bool | None:
    """Say whether the third of 3 columns counts 1, 2, 3, ...; None where there are too few to tell."""
    counts = width == 3 and all(
        score == rank for rank, score in enumerate(documents.values(), start=1)
    )
    return None if counts and len(documents) < 3 else counts


def _refuse_ranks(counts: Iterable[bool | None], path: Path | str) -> None:
    found = set(counts)
    if True in found and False not in found:
        message = "the third column counts 1, 2, 3, ... in each query: expected scores, got ranks (MS MARCO's form?)"
        raise FormatError(message, path=path, field="score")


def write_ranklist(
    path: Path | str, run: Mapping[str, Mapping[str, float]], *, trec: bool = False
) -> None:
    """Write a run, best first, scores in full precision.

    Ties, also those of float32, go by document id descending: the order of trec_eval and of our metrics, so that whoever
    cuts the file by its lines keeps the same documents.

    An id with white space would read back as two columns, and NaN not at all: both are errors.
    """
    with Path(path).open("w", encoding="utf-8", newline="\n") as stream:
        for query_id, documents in run.items():
            _check_id(query_id, path, "query_id")
            singles = array("f", documents.values())
            ordered = sorted(zip(singles, documents, strict=True), reverse=True)
            for rank, (_, docid) in enumerate(ordered, start=1):
                score = documents[docid]
                _check_id(docid, path, "docid")
                if math.isnan(score):
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
