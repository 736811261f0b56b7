"""Ranked lists: `query_id docid score`, or TREC's `query_id Q0 docid rank score tag`; tabs or blanks.

Scores decide the order, ranks are not looked at (many tools write 0). Knows no metric.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from pathlib import Path

from tevatron.core.errors import FormatError
from tevatron.core.formats.files import read_blocks

Run = dict[str, dict[str, float]]
"""Scores by query and document."""


def split_columns(text: str) -> list[str]:
    """Split at blanks and tabs only: an id may contain other white space, such as a no-break space."""
    if text.isascii():
        return text.split()
    return [column.decode() for column in text.encode().split()]


def read_ranklist(path: Path | str) -> Run:
    """Read a run, plain or compressed.

    Raises:
        FormatError: A line has other columns than these, or a score that is no number; a document is given twice for a
            query; or the third of 3 columns counts 1, 2, 3, ... as MS MARCO's runs do, which hold ranks and no scores.
    """
    run: Run = {}
    has_scores_only, last = True, None
    documents: dict[str, float] = {}
    for block in read_blocks(path):
        # Runs have millions of lines: no call and no object a line that is not needed.
        split = str.split if block.is_ascii else split_columns
        for number, text in enumerate(block.lines, start=block.number):
            columns = split(text)
            if len(columns) >= 6:
                # trec_eval takes all that is left as the tag, which may have blanks in it.
                query_id, docid, written = columns[0], columns[2], columns[4]
                has_scores_only = False
            elif len(columns) == 3:
                query_id, docid, written = columns
            elif not columns:
                continue
            else:
                message = (
                    f"expected 3 columns (query_id docid score) or TREC's 6, got {len(columns)}"
                )
                raise FormatError(message, path=path, line=number)
            if query_id != last:
                documents = run.setdefault(query_id, {})
                last = query_id
            score = _number(written)
            if score != score or docid in documents:
                raise _fault(columns, written, path, number)
            documents[docid] = score
    if has_scores_only and _holds_ranks(run):
        message = "the third column counts 1, 2, 3, ... in each query: expected scores, got ranks (MS MARCO's form?)"
        raise FormatError(message, path=path, field="score")
    return run


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


def _holds_ranks(run: Run) -> bool:
    """Say whether every query's scores count up from 1, and one of them to 3 at least."""
    return any(len(documents) > 2 for documents in run.values()) and all(
        all(score == rank for rank, score in enumerate(documents.values(), start=1))
        for documents in run.values()
    )


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
    if split_columns(text) != [text]:
        raise FormatError(
            f"an id cannot be empty or contain white space, got {text!r}", path=path, field=field
        )
