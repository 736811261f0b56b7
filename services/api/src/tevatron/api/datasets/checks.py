"""Reads a dataset once from end to end: every fault is found here, not in the middle of a training run.

Knows what each kind of dataset is read with, and what is counted meanwhile. The readers name file, line and field.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from tevatron.core.contracts.resources import DatasetKind
from tevatron.core.errors import FormatError, InputError
from tevatron.core.formats.beir import BeirFolder
from tevatron.core.formats.candidates import check_run
from tevatron.core.formats.files import sha256_file, sha256_tree
from tevatron.core.formats.training import read_training

Stats = dict[str, JsonValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What a whole dataset was found to be."""

    sha256: str
    stats: Stats


def inspect_dataset(kind: DatasetKind, path: Path) -> Inspection:
    """Read all of it; the first fault is a `FormatError`."""
    is_folder = kind is DatasetKind.BEIR
    if path.is_dir() != is_folder:
        expected, got = ("a folder", "a file") if is_folder else ("a file", "a folder")
        raise InputError(f"a dataset of kind {kind} is {expected}, got {got}: {path.name!r}")
    try:
        stats = _READERS[kind](path)
    except OSError as error:
        raise FormatError(f"cannot be read: {error.strerror or error}", path=path) from error
    return Inspection(sha256=sha256_tree(path) if is_folder else sha256_file(path), stats=stats)


def _training_stats(path: Path) -> Stats:
    rows = positives = negatives = 0
    for row in read_training(path):
        rows += 1
        positives += len(row.positives)
        negatives += len(row.negatives)
    if rows == 0:
        raise FormatError("no rows; expected one JSON object a line", path=path)
    return {"rows": rows, "positives": positives, "negatives": negatives}


def _ranklist_stats(path: Path) -> Stats:
    size = check_run(path)
    if size.rows == 0:
        raise FormatError("no rows; expected query id, document id, score", path=path)
    return {"queries": size.queries, "rows": size.rows}


def _beir_stats(path: Path) -> Stats:
    folder = BeirFolder(path)
    documents = sum(1 for _ in folder.corpus())
    if documents == 0:
        raise FormatError("no documents", path=path / "corpus.jsonl")
    queries = folder.queries()
    splits: dict[str, JsonValue] = {split: len(folder.qrels(split)) for split in folder.splits()}
    if not splits:
        raise FormatError("no qrels; expected qrels/<split>.tsv", path=path)
    return {"documents": documents, "queries": len(queries), "splits": splits}


_READERS: dict[DatasetKind, Callable[[Path], Stats]] = {
    DatasetKind.TRAINING: _training_stats,
    DatasetKind.RANKLIST: _ranklist_stats,
    DatasetKind.BEIR: _beir_stats,
}
