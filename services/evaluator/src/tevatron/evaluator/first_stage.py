"""The first stage of an evaluation: judged queries of a BEIR folder, and candidates from BM25 or from a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tevatron.core.errors import InputError
from tevatron.core.formats import candidates
from tevatron.core.formats.beir import BeirFolder
from tevatron.core.formats.qrels import Qrels
from tevatron.evaluator.bm25 import open_index
from tevatron.evaluator.metrics import cut
from tevatron.evaluator.overlap import check_overlap

Tell = Callable[[str], None]
"""Takes a remark that the user should see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """A BEIR folder with the judgments of one split."""

    folder: BeirFolder
    qrels: Qrels
    queries: Mapping[str, str]
    """The judged queries that have a text."""


def read_collection(path: Path, split: str, *, tell: Tell) -> Collection:
    """Read judgments and the judged queries."""
    folder = BeirFolder(path)
    qrels = folder.qrels(split)
    texts = folder.queries()
    queries = {qid: texts[qid] for qid in qrels if texts.get(qid, "").strip()}
    if not queries:
        raise InputError(
            f"none of the {len(qrels)} queries that split '{split}' judges has a text in queries.jsonl, such as "
            f"{sorted(qrels)[:3]}"
        )
    if lost := sorted(qrels.keys() - queries.keys()):
        tell(f"{len(lost)} judged queries have no text, such as {lost[:3]}")
    return Collection(folder=folder, qrels=qrels, queries=queries)


def retrieve_bm25(
    collection: Collection,
    *,
    depth: int,
    cache: Path,
    tell: Tell,
    on_progress: Callable[[int], None],
    check: Callable[[], None],
) -> dict[str, dict[str, float]]:
    """Retrieve for the judged queries with BM25."""
    index = open_index(collection.folder, cache=cache, check=check)
    known = set(index.docids)
    lost = {
        docid
        for grades in collection.qrels.values()
        for docid, grade in grades.items()
        if grade > 0
    } - known
    if lost:
        tell(
            f"{len(lost)} documents that are judged relevant are not in the corpus, such as {sorted(lost)[:3]}"
        )
    run: dict[str, dict[str, float]] = {}
    for query_id, query in collection.queries.items():
        check()
        run[query_id] = index.search(query, depth=depth)
        on_progress(len(run))
    if empty := sorted(qid for qid, documents in run.items() if not documents):
        tell(
            f"{len(empty)} queries share no word with the corpus and get no documents, such as {empty[:3]}"
        )
    return {qid: documents for qid, documents in run.items() if documents}


def read_run(
    path: Path, collection: Collection, *, depth: int, tell: Tell
) -> dict[str, dict[str, float]]:
    """Read the judged queries' candidates from a run that something else made."""
    run = candidates.read_run(path)
    check_overlap(collection.qrels, run)
    if extra := sorted(run.keys() - collection.qrels.keys()):
        tell(f"{len(extra)} queries of the run are not judged and are ignored, such as {extra[:3]}")
    return cut({qid: run[qid] for qid in collection.qrels if qid in run}, depth=depth)
