"""Hard negatives out of a run: what is ranked high, is not judged relevant, and does not look relevant either.

A candidate that scores higher than the query's lowest-scored positive less a margin is likely a relevant document that
nobody judged, and is dropped. Scores are a teacher's where there is one, else the run's own. Knows folders, runs and rows,
not models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from tevatron.core.errors import ConfigError, InputError
from tevatron.core.formats.beir import BeirFolder, Document
from tevatron.core.formats.training import Passage, TrainingRow
from tevatron.evaluator.files import whole_file
from tevatron.evaluator.made import Made
from tevatron.evaluator.metrics import Qrels, Run, rank


@dataclass(frozen=True, slots=True, kw_only=True)
class MineOptions:
    """Which candidates become negatives."""

    split: str = "train"
    depth: int = 100
    """Candidates of a query, from the top of the run."""
    skip: int = 0
    """Candidates at the very top that are left alone."""
    num_negatives: int = 15
    """Negatives of a query, at most: the hardest that are left."""
    margin: float = 0.0
    """How far below the lowest-scored positive a negative must score, in units of the scores."""

    def check(self) -> None:
        """Refuse what cannot be mined with."""
        if self.num_negatives < 1 or self.skip < 0 or self.depth <= self.skip:
            raise ConfigError(
                f"expected negatives of 1 or more, skip of 0 or more and depth over skip, got {self.num_negatives}, "
                f"{self.skip} and {self.depth}"
            )


@dataclass(slots=True, kw_only=True)
class Mined(Made):
    """What mining made."""

    num_too_good: int = 0
    """Candidates that score too close to a positive: likely relevant."""


def candidate_rows(
    dataset: BeirFolder, run: Run, options: MineOptions, report: Mined
) -> Iterator[TrainingRow]:
    """Yield a row for each judged query of the run: its positives, and candidates best first, with the run's scores."""
    options.check()
    qrels = _judged(dataset, run, options, report)
    queries = dataset.queries()
    tops = {qid: rank(run[qid])[options.skip : options.depth] for qid in qrels}
    documents = _read(dataset, qrels, tops)
    for query_id in sorted(qrels):
        if not queries.get(query_id, "").strip():
            report.leave_out(query_id, "has no text in queries.jsonl")
            continue
        grades, scores = qrels[query_id], run[query_id]
        positives = _passages((d for d in sorted(grades) if grades[d] > 0), documents, scores)
        if not positives:
            report.leave_out(query_id, "has no relevant document with words in the corpus")
            continue
        # A copy of a relevant document under another id is no negative.
        taken = {(passage.title, passage.text) for passage in positives}
        others = (docid for docid in tops[query_id] if grades.get(docid, 0) <= 0)
        negatives = [
            passage
            for passage in _passages(others, documents, scores)
            if (passage.title, passage.text) not in taken
        ]
        if not negatives:
            report.leave_out(query_id, "has no candidate that is not relevant")
            continue
        yield TrainingRow(query_id, queries[query_id], positives, negatives)


def mine(rows: Iterable[TrainingRow], options: MineOptions, report: Mined) -> Iterator[TrainingRow]:
    """Yield the rows with their hardest negatives, likely relevant ones dropped."""
    for row in rows:
        known = [passage.score for passage in row.positives if passage.score is not None]
        if not known:
            # Without its score nothing can be said to be below it.
            report.leave_out(row.query_id, "has no positive with a score to stay below")
            continue
        most = min(known) - options.margin
        scored = [(_score(passage), passage) for passage in row.negatives]
        fitting = [(score, passage) for score, passage in scored if score <= most]
        report.num_too_good += len(scored) - len(fitting)
        if not fitting:
            report.leave_out(row.query_id, "has no candidate far enough below its positives")
            continue
        # Stable, so that equal scores keep the run's order.
        fitting.sort(key=lambda pair: -pair[0])
        negatives = [passage for _, passage in fitting[: options.num_negatives]]
        report.num_rows += 1
        report.num_positives += len(row.positives)
        report.num_negatives += len(negatives)
        yield row._replace(negatives=negatives)


def write_rows(path: Path, rows: Iterable[TrainingRow]) -> int:
    """Write training rows, whole or not at all; return their number."""
    number = 0
    with whole_file(path) as beside, beside.open("w", encoding="utf-8") as file:
        for row in rows:
            number += 1
            content = {
                "query_id": row.query_id,
                "query": row.query,
                "positive_passages": [_fields(passage) for passage in row.positives],
                "negative_passages": [_fields(passage) for passage in row.negatives],
            }
            file.write(json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")
        if number == 0:
            raise InputError("no query is left to train on")
    return number


def _judged(dataset: BeirFolder, run: Run, options: MineOptions, report: Mined) -> Qrels:
    found: dict[str, Mapping[str, int]] = {}
    for query_id, grades in dataset.qrels(options.split).items():
        if not any(grade > 0 for grade in grades.values()):
            report.leave_out(query_id, "has no document that is judged relevant")
        elif query_id not in run:
            report.leave_out(query_id, "is not in the run")
        else:
            found[query_id] = grades
    if not found:
        raise InputError(
            f"no query of the run is judged in split '{options.split}': the run has {len(run)} queries such as "
            f"{sorted(run)[:3]}"
        )
    return found


def _read(
    dataset: BeirFolder, qrels: Qrels, tops: Mapping[str, Sequence[str]]
) -> dict[str, Document]:
    ranked = {docid for docids in tops.values() for docid in docids}
    positives = {docid for grades in qrels.values() for docid in grades if grades[docid] > 0}
    wanted = ranked | positives
    found = {document.docid: document for document in dataset.corpus() if document.docid in wanted}
    if lost := sorted(ranked - found.keys()):
        raise InputError(
            f"{len(lost)} of {len(ranked)} documents of the run are not in the corpus of {dataset.path.name}, such as "
            f"{lost[:3]}"
        )
    return found


def _passages(
    docids: Iterable[str], documents: Mapping[str, Document], scores: Mapping[str, float]
) -> list[Passage]:
    found = (documents.get(docid) for docid in docids)
    return [
        Passage(document.text, document.title, document.docid, scores.get(document.docid))
        for document in found
        if document is not None and (document.title.strip() or document.text.strip())
    ]


def _score(passage: Passage) -> float:
    assert passage.score is not None  # from the run, or from the teacher
    return passage.score


def _fields(passage: Passage) -> dict[str, JsonValue]:
    fields: dict[str, JsonValue] = {"docid": passage.docid} if passage.docid is not None else {}
    fields |= {"title": passage.title, "text": passage.text}
    return fields if passage.score is None else {**fields, "score": passage.score}
