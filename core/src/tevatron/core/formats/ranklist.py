"""Ranked lists: `query_id docid score`, or TREC's `query_id Q0 docid rank score tag`; tabs or blanks.

Scores decide the order, ranks are not looked at (many tools write 0). Knows no metric.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from pathlib import Path

from tevatron.core.errors import FormatError
from tevatron.core.formats.files import read_lines

Run = dict[str, dict[str, float]]
"""Scores by query and document."""


def split_columns(text: str) -> list[str]:
    """Split at blanks and tabs only: an id may contain other white space, such as a no-break space."""
    if text.isascii():
        return text.split()
    return [column.decode() for column in text.encode().split()]


def read_ranklist(path: Path | str) -> Run:
    """Read a run, plain or compressed; a score that is no finite number or a document given twice is an error."""
    run: Run = {}
    for number, text in read_lines(path):
        columns = split_columns(text)
        if len(columns) == 6:
            query_id, _, docid, _, written, _ = columns
        elif len(columns) == 3:
            query_id, docid, written = columns
        else:
            message = f"expected 3 columns (query_id docid score) or TREC's 6, got {len(columns)}"
            raise FormatError(message, path=path, line=number)
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
        documents = run.setdefault(query_id, {})
        if docid in documents:
            message = f"document '{docid}' is given twice for query '{query_id}'"
            raise FormatError(message, path=path, line=number, field="docid")
        documents[docid] = score
    return run


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
    if split_columns(text) != [text]:
        raise FormatError(
            f"an id cannot be empty or contain white space, got {text!r}", path=path, field=field
        )
