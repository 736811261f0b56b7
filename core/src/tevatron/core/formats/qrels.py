"""Relevance judgments: TREC's `query_id 0 docid grade`, BEIR's `query-id corpus-id score` with a header, or that as JSONL."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tevatron.core.errors import FormatError
from tevatron.core.formats.files import read_json_lines, read_lines
from tevatron.core.formats.ranklist import split_columns

Qrels = dict[str, dict[str, int]]
"""Grades by query and document."""

_FORMS = {4: "TREC's 4 columns", 3: "BEIR's 3 (query-id corpus-id score)"}
_HEADER = ["query-id", "corpus-id"]


class _Judgment(NamedTuple):
    line: int
    query_id: str
    docid: str
    written: str
    """The grade as it stands in the file."""


def read_qrels(path: Path | str) -> Qrels:
    """Read judgments; a grade that is no whole number, or two grades of one document, are errors."""
    first = next(read_lines(path), None)
    if first is None:
        return {}
    judgments = _from_json(path) if first.text.lstrip().startswith("{") else _from_columns(path)
    qrels: Qrels = {}
    for line, query_id, docid, written in judgments:
        grade = _grade(written, path, line)
        grades = qrels.setdefault(query_id, {})
        if grades.setdefault(docid, grade) != grade:
            message = f"document '{docid}' of query '{query_id}' has two grades, {grades[docid]} and {grade}"
            raise FormatError(message, path=path, line=line, field="score")
    return qrels


def _from_columns(path: Path | str) -> Iterator[_Judgment]:
    width = None
    for number, text in read_lines(path):
        columns = split_columns(text)
        expected = " or ".join(_FORMS.values())
        if width is not None and len(columns) in _FORMS:
            # A blank within an id makes a line of one form look like one of another.
            expected = f"{_FORMS[width]} as in the lines before"
        if len(columns) not in _FORMS or len(columns) != (width or len(columns)):
            message = f"expected {expected}, got {len(columns)}"
            raise FormatError(message, path=path, line=number)
        if width is not None or columns[:2] != _HEADER:
            yield _Judgment(number, columns[0], columns[-2], columns[-1])
        width = len(columns)


def _from_json(path: Path | str) -> Iterator[_Judgment]:
    for record in read_json_lines(path):
        query_id, docid = record.identifier("query-id"), record.identifier("corpus-id")
        yield _Judgment(record.line, query_id, docid, json.dumps(record.number("score")))


def _grade(written: str, path: Path | str, number: int) -> int:
    try:
        # Tables that went through a data frame have 1.0 where 1 was meant; trec_eval would read 0.9 as 0.
        grade = float(written.replace("_", "?"))
        if grade.is_integer():
            return int(grade)
    except ValueError:
        pass
    message = f"expected a whole number, got '{written}'"
    raise FormatError(message, path=path, line=number, field="score")
