"""Training data as JSON Lines: queries with positive and negative passages, or passages with a teacher's scores.

Two forms, told apart row by row:
  query_id, query (or query_text), positive_passages [{docid, title, text, score}], negative_passages [...]
  query_id, query, passages [{title, text}], scores [...] in the same order; the first num_positives passages are
  positive, 1 where it is not given
Ids, titles and scores may be absent; ids may be numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tevatron.core.formats.files import Record, read_json_lines


class Passage(NamedTuple):
    """A passage, with the teacher's score where there is one."""

    text: str
    title: str = ""
    docid: str | None = None
    score: float | None = None


class TrainingRow(NamedTuple):
    """One query with at least one positive passage."""

    query_id: str
    """The row's id; its line number where it has none."""
    query: str
    positives: list[Passage]
    negatives: list[Passage]

    @property
    def has_teacher_scores(self) -> bool:
        """Whether every passage of the row carries a teacher's score."""
        return all(passage.score is not None for passage in (*self.positives, *self.negatives))


def read_training(path: Path | str) -> Iterator[TrainingRow]:
    """Yield the rows of a training file; the first that is broken is a `FormatError`."""
    for _, row in read_numbered(path):
        yield row


def read_numbered(path: Path | str) -> Iterator[tuple[int, TrainingRow]]:
    """Yield the rows with their line numbers, for whoever checks more of them than their form."""
    for record in read_json_lines(path):
        yield record.line, _row(record)


def _row(record: Record) -> TrainingRow:
    query = record.text(
        "query_text" if record.has("query_text") and not record.has("query") else "query"
    )
    if not query.strip():
        record.fail("expected a query, got an empty one", "query")
    query_id = record.identifier("query_id", default=str(record.line))
    if record.has("passages"):
        passages = _distillation(record)
        num_positives = _num_positives(record, len(passages))
        return TrainingRow(query_id, query, passages[:num_positives], passages[num_positives:])
    positives = [_passage(entry) for entry in record.records("positive_passages")]
    if not positives:
        record.fail("expected at least one positive passage, got none", "positive_passages")
    negatives = [_passage(entry) for entry in record.records("negative_passages", required=False)]
    return TrainingRow(query_id, query, positives, negatives)


def _distillation(record: Record) -> list[Passage]:
    passages = [_passage(entry) for entry in record.records("passages")]
    if not passages:
        record.fail("expected at least one passage, got none", "passages")
    scores = record.values("scores")
    if len(scores) != len(passages):
        record.fail(
            f"expected one score for each of {len(passages)} passages, got {len(scores)}", "scores"
        )
    return [
        passage._replace(score=record.as_number(score, f"scores[{place}]"))
        for place, (passage, score) in enumerate(zip(passages, scores, strict=True))
    ]


def _num_positives(record: Record, num_passages: int) -> int:
    if not record.has("num_positives"):
        return 1
    number = record.number("num_positives")
    if not number.is_integer() or not 1 <= number <= num_passages:
        record.fail(
            f"expected a whole number from 1 to {num_passages}, got {number:g}", "num_positives"
        )
    return int(number)


def _passage(entry: Record) -> Passage:
    title, text = entry.text("title", default=""), entry.text("text", default="")
    if not title.strip() and not text.strip():
        entry.fail("expected a passage, got an empty one: title and text are both empty", "text")
    docid = entry.identifier("docid") if entry.has("docid") else None
    return Passage(text, title, docid, entry.number("score") if entry.has("score") else None)
