"""The rerank input `rerank.jsonl`: one query and passage a line, with the first stage's score where it is known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tevatron.core.formats.files import Record, read_json_lines


class RerankRow(NamedTuple):
    """One pair to score."""

    query_id: str
    query: str
    docid: str
    title: str = ""
    text: str = ""
    score: float | None = None
    """The first stage's score."""


def read_rerank(path: Path | str) -> Iterator[RerankRow]:
    """Yield the pairs of a file; more fields than these are allowed and left out."""
    return map(rerank_row, read_json_lines(path))


def rerank_row(record: Record) -> RerankRow:
    """Read one pair."""
    return RerankRow(
        query_id=record.identifier("query_id"),
        query=record.text("query"),
        docid=record.identifier("docid"),
        title=record.text("title", default=""),
        text=record.text("text", default=""),
        score=record.number("score") if record.has("score") else None,
    )


def write_rerank(path: Path | str, rows: Iterable[RerankRow]) -> None:
    """Write pairs, one JSON object a line."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as stream:
        for row in rows:
            fields = {key: value for key, value in row._asdict().items() if value is not None}
            stream.write(json.dumps(fields, ensure_ascii=False) + "\n")
