"""Relevance judgments: TREC's `query_id 0 docid grade`, or BEIR's `query-id corpus-id score` with a header."""

from __future__ import annotations

from pathlib import Path

from tevatron.core.errors import FormatError
from tevatron.core.formats.ranklist import read_columns

Qrels = dict[str, dict[str, int]]
"""Grades by query and document."""


def read_qrels(path: Path | str) -> Qrels:
    """Read judgments; a grade that is no whole number, or two grades of one document, are errors."""
    qrels: Qrels = {}
    forms = {4: "TREC's 4 columns", 3: "BEIR's 3 (query-id corpus-id score)"}
    for number, columns in read_columns(path, forms=forms):
        if not qrels and columns[:2] == ["query-id", "corpus-id"]:
            continue
        query_id, docid, written = columns[0], columns[-2], columns[-1]
        grade = _grade(written, path, number)
        grades = qrels.setdefault(query_id, {})
        if grades.setdefault(docid, grade) != grade:
            message = f"document '{docid}' of query '{query_id}' has two grades, {grades[docid]} and {grade}"
            raise FormatError(message, path=path, line=number, field="score")
    return qrels


def _grade(written: str, path: Path | str, number: int) -> int:
    try:
        return int(written)
    except ValueError:
        message = f"expected a whole number, got '{written}'"
        raise FormatError(message, path=path, line=number, field="score") from None
