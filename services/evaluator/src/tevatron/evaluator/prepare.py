"""Training data and held-out queries out of a BEIR folder.

Negatives of a query: what its judgments call not relevant, then a seeded draw from BM25's best that are not judged
relevant. Queries are held out by the hash of their id, so that the same ones stay out whatever the seed, the number of
negatives or the order of the files. Knows folders and rows, not models.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from tevatron.core.errors import ConfigError, InputError
from tevatron.core.formats.beir import BeirFolder, Document
from tevatron.evaluator.bm25 import Bm25Index, open_index
from tevatron.evaluator.files import whole_file
from tevatron.evaluator.made import Made
from tevatron.evaluator.metrics import Qrels

TRAINING_NAME = "train.jsonl"
HELDOUT_NAME = "heldout"
HELDOUT_SPLIT = "test"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """What to make of the folder."""

    num_queries: int | None = None
    """Test queries to hold out; all of them when unset, which needs a training split."""
    num_negatives: int = 15
    """Negatives of a query, at most."""
    depth: int = 50
    """How deep in BM25's ranking negatives are drawn from."""
    train_split: str = "train"
    test_split: str = "test"
    seed: int = 42
    """Of the draw of negatives; which queries are held out does not depend on it."""


@dataclass(slots=True, kw_only=True)
class Prepared(Made):
    """What preparing made."""

    num_heldout: int = 0


def prepare(
    dataset: BeirFolder, output_dir: Path, options: PrepareOptions, *, cache: Path | None = None
) -> Prepared:
    """Write `train.jsonl` and the BEIR folder `heldout/`."""
    if options.num_negatives < 1 or options.depth < 1:
        raise ConfigError(
            f"negatives and depth must be 1 or more, got {options.num_negatives} and {options.depth}"
        )
    report = Prepared()
    queries = dataset.queries()
    heldout, train = _divide(dataset, queries, options, report)
    documents = {document.docid: document for document in dataset.corpus()}
    index = open_index(dataset, cache=cache)
    rows = (
        _row(query_id, queries[query_id], train[query_id], documents, index, options, report)
        for query_id in sorted(train)
    )
    output_dir.mkdir(parents=True, exist_ok=True)
    with whole_file(output_dir / TRAINING_NAME) as path, path.open("w", encoding="utf-8") as file:
        for row in rows:
            if row is not None:
                report.num_rows += 1
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        if report.num_rows == 0:
            raise InputError(f"{dataset.path}: no query is left to train on: {_summary(report)}")
    _write_heldout(
        dataset, output_dir / HELDOUT_NAME, {qid: queries[qid] for qid in heldout}, heldout
    )
    report.num_heldout = len(heldout)
    return report


def choose(query_ids: Iterable[str], count: int) -> list[str]:
    """Return the `count` ids whose hashes are smallest: the same ones on every machine, more of them with a larger count."""
    return sorted(query_ids, key=lambda qid: hashlib.sha256(qid.encode()).hexdigest())[:count]


def _divide(
    dataset: BeirFolder, queries: Mapping[str, str], options: PrepareOptions, report: Prepared
) -> tuple[Qrels, Qrels]:
    """Return the judgments of the held-out queries, and those of the training queries."""
    test = _usable(dataset.qrels(options.test_split), queries, report)
    count = options.num_queries
    if count is not None and not 1 <= count <= len(test):
        raise ConfigError(
            f"--queries must be between 1 and the {len(test)} usable test queries, got {count}"
        )
    has_train = options.train_split in dataset.splits()
    if not has_train and (count is None or count == len(test)):
        raise ConfigError(
            f"{dataset.path} has no judgments of a split '{options.train_split}': say with --queries how many of its "
            f"{len(test)} test queries are held out, fewer than all; the others train"
        )
    chosen = set(test if count is None else choose(test, count))
    heldout = {qid: grades for qid, grades in test.items() if qid in chosen}
    if has_train:
        candidates = _usable(dataset.qrels(options.train_split), queries, report)
        for qid in sorted(candidates.keys() & test.keys()):
            report.leave_out(qid, "is a test query too")
        train = {qid: grades for qid, grades in candidates.items() if qid not in test}
    else:
        train = {qid: grades for qid, grades in test.items() if qid not in chosen}
    return heldout, train


def _usable(qrels: Qrels, queries: Mapping[str, str], report: Prepared) -> Qrels:
    usable = {}
    for qid, grades in qrels.items():
        if qid not in queries:
            report.leave_out(qid, "has no text in queries.jsonl")
        elif not queries[qid].strip():
            report.leave_out(qid, "has an empty text")
        elif not any(grade > 0 for grade in grades.values()):
            report.leave_out(qid, "has no document that is judged relevant")
        else:
            usable[qid] = grades
    return usable


def _row(
    query_id: str,
    query: str,
    grades: Mapping[str, int],
    documents: Mapping[str, Document],
    index: Bm25Index,
    options: PrepareOptions,
    report: Prepared,
) -> dict[str, JsonValue] | None:
    """Return a row of the training file, or nothing where the query cannot train."""
    # Best grade first; a document without words cannot be read by anybody.
    relevant = sorted(
        (docid for docid, grade in grades.items() if grade > 0), key=lambda d: (-grades[d], d)
    )
    positives = [documents[docid] for docid in relevant if _has_words(documents.get(docid))]
    if not positives:
        report.leave_out(query_id, "has no relevant document with words in the corpus")
        return None
    negatives = _negatives(query_id, query, grades, positives, documents, index, options)
    if not negatives:
        report.leave_out(query_id, "has no negative: BM25 finds nothing but relevant documents")
        return None
    report.num_positives += len(positives)
    report.num_negatives += len(negatives)
    return {
        "query_id": query_id,
        "query": query,
        "positive_passages": [_passage(document) for document in positives],
        "negative_passages": [_passage(document) for document in negatives],
    }


def _negatives(
    query_id: str,
    query: str,
    grades: Mapping[str, int],
    positives: list[Document],
    documents: Mapping[str, Document],
    index: Bm25Index,
    options: PrepareOptions,
) -> list[Document]:
    # A copy of a relevant document under another id is no negative.
    taken = {(document.title, document.text) for document in positives}
    judged = [docid for docid in sorted(grades) if grades[docid] <= 0]
    found = [docid for docid in index.search(query, depth=options.depth) if docid not in grades]
    usable_judged, usable_found = (
        [
            documents[docid]
            for docid in docids
            if _has_words(documents.get(docid))
            and (documents[docid].title, documents[docid].text) not in taken
        ]
        for docids in (judged, found)
    )
    draw = random.Random(f"{options.seed}:{query_id}")
    first = _draw(usable_judged, options.num_negatives, draw)
    return first + _draw(usable_found, options.num_negatives - len(first), draw)


def _draw(documents: list[Document], count: int, draw: random.Random) -> list[Document]:
    """Draw without replacement, and keep the order."""
    if len(documents) <= count:
        return documents
    return [documents[place] for place in sorted(draw.sample(range(len(documents)), count))]


def _has_words(document: Document | None) -> bool:
    return document is not None and bool(document.title.strip() or document.text.strip())


def _passage(document: Document) -> dict[str, JsonValue]:
    return {"docid": document.docid, "title": document.title, "text": document.text}


def _write_heldout(
    dataset: BeirFolder, folder: Path, queries: Mapping[str, str], qrels: Qrels
) -> None:
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("corpus.jsonl*"):
        if stale.name != dataset.corpus_path.name:
            stale.unlink()
    # A copy: a symbolic link would point out of a dataset root, a hard link would share owner and mode.
    with whole_file(folder / dataset.corpus_path.name) as path:
        shutil.copyfile(dataset.corpus_path, path)
    with whole_file(folder / "queries.jsonl") as path, path.open("w", encoding="utf-8") as file:
        for qid, text in queries.items():
            file.write(json.dumps({"_id": qid, "text": text}, ensure_ascii=False) + "\n")
    with (
        whole_file(folder / "qrels" / f"{HELDOUT_SPLIT}.tsv") as path,
        path.open("w", encoding="utf-8") as file,
    ):
        file.write("query-id\tcorpus-id\tscore\n")
        for qid, grades in qrels.items():
            file.writelines(f"{qid}\t{docid}\t{grade}\n" for docid, grade in grades.items())


def _summary(report: Prepared) -> str:
    return (
        "; ".join(f"{len(ids)} {reason}" for reason, ids in report.left_out.items())
        or "the split is empty"
    )
