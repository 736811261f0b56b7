"""One query's passages, out of the files that eval jobs leave: the runs with their scores, the data set's texts and grades.

Postgres holds means and each query's values; everything here is read from below TEVATRON_DATA, and what is not there any
more is said.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Self

from tevatron.core.errors import InputError
from tevatron.core.formats.beir import BeirFolder, Document
from tevatron.core.formats.ranklist import split_columns
from tevatron.core.store.models import Dataset, Evaluation

RUN_NAME = "run.txt"
"""The run that an eval job leaves in its folder, best first, queries in one piece each."""
PASSAGES_SHOWN = 20
"""Of each run."""
MAX_CORPUS_BYTES = 256 * 2**20
"""A larger corpus is not searched for texts: it would take longer than anybody waits for a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What is needed of an evaluation."""

    name: str
    job_id: str
    depth: int | None
    """Candidates that were scored; those below have made-up scores that only keep their order. None: a first stage."""

    @classmethod
    def of(cls, evaluation: Evaluation) -> Self:
        """Read it from the row."""
        depth = None if evaluation.rerank is None else evaluation.rerank.get("depth")
        return cls(
            name=evaluation.name or evaluation.id,
            job_id=evaluation.job_id,
            depth=depth if isinstance(depth, int) else None,
        )


class Placed(NamedTuple):
    """Where a run has a passage."""

    rank: int
    score: float | None
    """None where the model did not score it."""


class Passage(NamedTuple):
    """One passage, with its place in each run."""

    docid: str
    document: Document | None
    grade: int | None
    places: list[Placed | None]


@dataclass(slots=True)
class Read:
    """What the files say, and what is not there."""

    text: str | None = None
    """The query's."""
    passages: list[Passage] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def read_passages(
    data: Path, dataset: Dataset, split: str, shown: list[Shown], query_id: str
) -> Read:
    """Return the best passages of each run for one query."""
    read = Read()
    runs = [_places(data, one, query_id, read) for one in shown]
    docids = list(dict.fromkeys(docid for run in runs for docid in list(run)[:PASSAGES_SHOWN]))
    documents: dict[str, Document] = {}
    grades: dict[str, int] = {}
    try:
        folder = BeirFolder(data / dataset.path)
        read.text = folder.queries().get(query_id)
        grades = folder.qrels(split).get(query_id, {})
        documents = _documents(folder, set(docids), read)
    except InputError as error:
        read.missing.append(f"The data set cannot be read: {error}")
    read.passages = [
        Passage(docid, documents.get(docid), grades.get(docid), [run.get(docid) for run in runs])
        for docid in docids
    ]
    return read


def _places(data: Path, shown: Shown, query_id: str, read: Read) -> dict[str, Placed]:
    """Return one query's documents, best first."""
    places: dict[str, Placed] = {}
    try:
        # As with a log: a link in a run folder is not followed.
        descriptor = os.open(
            data / "runs" / shown.job_id / RUN_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        )
    except OSError:
        read.missing.append(f"The run of {shown.name} is not kept here (any more): no scores.")
        return places
    with os.fdopen(descriptor, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if not line.startswith(query_id):
                if places:
                    break
                continue
            columns = split_columns(line)
            if len(columns) != 6 or columns[0] != query_id:
                continue
            rank = len(places) + 1
            is_scored = shown.depth is None or rank <= shown.depth
            places[columns[2]] = Placed(rank, float(columns[4]) if is_scored else None)
    return places


def _documents(folder: BeirFolder, wanted: set[str], read: Read) -> dict[str, Document]:
    size = folder.corpus_path.stat().st_size
    if size > MAX_CORPUS_BYTES:
        read.missing.append(
            f"Texts are not shown: the corpus has {size >> 20} MiB, and only one of up to {MAX_CORPUS_BYTES >> 20} MiB "
            "is searched for a page."
        )
        return {}
    found: dict[str, Document] = {}
    for document in folder.corpus():
        if len(found) == len(wanted):
            break
        if document.docid in wanted:
            found[document.docid] = document
    return found
