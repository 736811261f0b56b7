"""Candidates of queries with or without text: the reference's `rerank.jsonl`, and RankLLM's JSON; and any file that ranks.

RankLLM's forms, as a JSON array or JSON Lines: `{query, hits: [{qid, docid, score, content}]}` of its first versions, and
`{query: {qid, text}, candidates: [{docid, score, doc}]}` of later ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tevatron.core.errors import FormatError
from tevatron.core.formats.files import Record, read_json_array, read_json_lines, read_lines
from tevatron.core.formats.ranklist import Run, RunSize, check_ranklist, read_ranklist
from tevatron.core.formats.rerank import RerankRow, rerank_row

_TEXTS = ("text", "segment", "contents", "content", "body", "passage")
"""Where RankLLM looks for a passage's text, in its order."""


def read_candidates(path: Path | str) -> Iterator[RerankRow]:
    """Yield the pairs of a `rerank.jsonl` or of RankLLM's JSON, in the file's order."""
    records = read_json_array(path) if _start(path) == "[" else read_json_lines(path)
    for record in records:
        if record.has("hits") or record.has("candidates"):
            yield from _rank_llm(record)
        else:
            yield rerank_row(record)


def read_run(path: Path | str) -> Run:
    """Read a run: columns as `read_ranklist`, or candidates with scores; a document given twice is an error."""
    if _start(path) not in ("{", "["):
        return read_ranklist(path)
    run: Run = {}
    for row in read_candidates(path):
        place = f"document '{row.docid}' of query '{row.query_id}'"
        if row.score is None:
            raise FormatError(f"{place} has no score to rank it by", path=path, field="score")
        documents = run.setdefault(row.query_id, {})
        if row.docid in documents:
            raise FormatError(f"{place} is given twice", path=path, field="docid")
        documents[row.docid] = row.score
    return run


def check_run(path: Path | str) -> RunSize:
    """Read a run as `read_run` does; of columns only one query's documents are kept."""
    if _start(path) not in ("{", "["):
        return check_ranklist(path)
    run = read_run(path)
    return RunSize(len(run), sum(map(len, run.values())))


def _start(path: Path | str) -> str:
    first = next(read_lines(path), None)
    return "" if first is None else first.text.lstrip()[:1]


def _rank_llm(record: Record) -> Iterator[RerankRow]:
    if record.has("hits"):
        query, known = record.text("query"), None
        for hit in record.records("hits"):
            query_id = hit.identifier("qid")
            if known not in (None, query_id):
                hit.fail(
                    f"expected the query id '{known}' of the hits before, got '{query_id}'", "qid"
                )
            known = query_id
            yield _row(hit, query_id, query, text=hit.text("content", default=""))
        return
    asked = record.record("query")
    query_id, query = asked.identifier("qid"), asked.text("text")
    for candidate in record.records("candidates"):
        doc = candidate.record("doc") if candidate.has("doc") else None
        field = next((name for name in _TEXTS if doc is not None and doc.has(name)), None)
        yield _row(
            candidate,
            query_id,
            query,
            title=doc.text("title", default="") if doc is not None else "",
            text=doc.text(field) if doc is not None and field is not None else "",
        )


def _row(record: Record, query_id: str, query: str, *, text: str, title: str = "") -> RerankRow:
    return RerankRow(
        query_id=query_id,
        query=query,
        docid=record.identifier("docid"),
        title=title,
        text=text,
        score=record.number("score") if record.has("score") else None,
    )
