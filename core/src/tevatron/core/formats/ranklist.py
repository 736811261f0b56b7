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


def _stretches(  # noqa: C901  cut in two, it would call a function for each of millions of lines
    path: Path | str, run: Run
) -> Iterator[tuple[str, dict[str, float], int]]:
    """Read lines into `run`; at the end of each stretch of one query yield it, its documents and the line's columns."""
    width, last = -1, None
    documents: dict[str, float] = {}
    columns: list[str] = []
    number = 0
    for block in read_blocks(path):
        # Runs have millions of lines: no call and no object a line that is not needed.
        split = str.split if block.is_ascii else split_columns
        try:
            for number, text in enumerate(block.lines, start=block.number):
                columns = split(text)
                if len(columns) != width:
                    if not columns:
                        continue
                    width = _checked_width(len(columns), width, path, number)
                if width == 3:
                    query_id, docid, written = columns
                else:
                    query_id, docid, written = columns[0], columns[2], columns[4]
                if query_id != last:
                    if last is not None:
                        yield last, documents, width
                    documents = run.setdefault(query_id, {})
                    last = query_id
                score = float(written)
                if score != score or docid in documents:
                    raise _fault(columns, path, number)
                documents[docid] = score
        except ValueError:
            raise _fault(columns, path, number) from None
    if last is not None:
        yield last, documents, width


def _checked_width(width: int, before: int, path: Path | str, number: int) -> int:
    """Return the columns of a line, which may be more than 6: trec_eval takes all that is left as the tag."""
    is_form = width == 3 or width >= 6
    if is_form and (before < 0 or (width >= 6) == (before >= 6)):
        return width
    expected = "3 columns (query_id docid score) or TREC's 6"
    if is_form:
        # A blank within an id makes a line of one form look like one of another.
        expected = f"{min(before, 6)} columns as in the lines before"
    raise FormatError(f"expected {expected}, got {width}", path=path, line=number)


def _fault(columns: list[str], path: Path | str, number: int) -> FormatError:
    """Say what is wrong with a line: its score, else that its document was there before."""
    query_id, docid, written = columns if len(columns) == 3 else columns[:5:2]
    try:
        if math.isnan(float(written)):
            message = f"the score of document '{docid}' of query '{query_id}' is NaN, which has no place in a ranking"
            return FormatError(message, path=path, line=number, field="score")
    except ValueError:
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
