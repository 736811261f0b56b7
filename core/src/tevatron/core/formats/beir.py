"""A BEIR folder: corpus.jsonl, queries.jsonl and qrels/<split>.tsv (or .jsonl), each plain, .gz or .zst."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tevatron.core.errors import FormatError, InputError, unknown_name
from tevatron.core.formats.files import Record, read_json_lines
from tevatron.core.formats.qrels import Qrels, read_qrels
from tevatron.core.formats.ranklist import can_be_column

_ENDINGS = ("", ".gz", ".zst")


class Document(NamedTuple):
    """One document of a corpus."""

    docid: str
    title: str
    text: str


def _identifier(record: Record) -> str:
    """Return the id of a document or query, which must fit into the qrels and into a run."""
    text = record.identifier("_id")
    if not can_be_column(text):
        record.fail(
            f"an id cannot contain white space, which parts the columns of qrels and runs, got {text!r}",
            "_id",
        )
    return text


class BeirFolder:
    """Readers of a BEIR folder; files are looked for when it is made, and read when asked."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise InputError(f"{self.path} is not a BEIR folder: no such folder")
        self._corpus = self._find("corpus.jsonl")
        self._queries = self._find("queries.jsonl")
        if not self.splits():
            raise InputError(f"{self.path} is not a BEIR folder: expected qrels/<split>.tsv in it")

    def _find(self, name: str) -> Path:
        for ending in _ENDINGS:
            if (found := self.path / f"{name}{ending}").is_file():
                return found
        raise InputError(f"{self.path} is not a BEIR folder: expected {name} (or .gz, .zst) in it")

    @property
    def corpus_path(self) -> Path:
        """The corpus file: what an index of it is cached by."""
        return self._corpus

    def corpus(self) -> Iterator[Document]:
        """Yield the documents in the file's order; empty ones too, an id given twice is an error."""
        seen: set[str] = set()
        for record in read_json_lines(self._corpus):
            docid = _identifier(record)
            if docid in seen:
                record.fail(f"document '{docid}' is given twice", "_id")
            seen.add(docid)
            yield Document(docid, record.text("title", default=""), record.text("text", default=""))

    def queries(self) -> dict[str, str]:
        """Return the text of every query of the folder by id, those of all splits."""
        queries: dict[str, str] = {}
        for record in read_json_lines(self._queries):
            query_id = _identifier(record)
            if query_id in queries:
                record.fail(f"query '{query_id}' is given twice", "_id")
            queries[query_id] = record.text("text")
        return queries

    def splits(self) -> list[str]:
        """Return the names of the splits that have judgments."""
        return sorted(_files_by_split(self.path))

    def qrels(self, split: str) -> Qrels:
        """Return the judgments of a split; an unknown one is an error that lists them."""
        return read_split(self.path, split)


def read_split(folder: Path | str, split: str) -> Qrels:
    """Return the judgments of a split of a BEIR folder, which needs neither corpus nor queries for that."""
    files = _files_by_split(Path(folder))
    if split not in files:
        raise InputError(f"{folder}: {unknown_name('split', split, files)}")
    qrels = read_qrels(files[split])
    if not qrels:
        raise FormatError("expected judgments, got none", path=files[split])
    return qrels


def _files_by_split(folder: Path) -> dict[str, Path]:
    """Return the file of judgments of each split; of several the plain one."""
    found: dict[str, Path] = {}
    for ending in reversed(_ENDINGS):
        for form in (".jsonl", ".tsv"):
            for path in (folder / "qrels").glob(f"*{form}{ending}"):
                found[path.name.removesuffix(f"{form}{ending}")] = path
    return found
