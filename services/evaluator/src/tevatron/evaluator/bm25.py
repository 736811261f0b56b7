"""BM25 over a corpus: bm25s, Lucene's formula with k1 .9 and b .4, Porter stemmer, Lucene's 33 stop words.

A document is its title, a blank and its text. Equal scores rank by docid descending, as the metrics rank them, also at
the cut. An index may be kept in a cache folder by the hash of the corpus; it is whole when it has its name. Knows
documents and queries, not judgments or jobs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import bm25s
import numpy as np
import numpy.typing as npt
import Stemmer

from tevatron.core.errors import InputError
from tevatron.core.formats.beir import BeirFolder, Document
from tevatron.core.formats.files import sha256_file

K1 = 0.9
B = 0.4
STOP_WORDS = frozenset(
    [
        "a",
        "an",
        "and",
        "are",
        "as",
        "at",
        "be",
        "but",
        "by",
        "for",
        "if",
        "in",
        "into",
        "is",
        "it",
        "no",
        "not",
        "of",
        "on",
        "or",
        "such",
        "that",
        "the",
        "their",
        "then",
        "there",
        "these",
        "they",
        "this",
        "to",
        "was",
        "will",
        "with",
    ]
)
ANALYSIS_VERSION = 1
"""Raise it when `analyze` or the indexed text changes: it is part of the cache's key."""

_WORD = re.compile(r"\w+")
_DOCIDS_NAME = "docids.json"
_CHECK_EVERY = 1000


def no_check() -> None:
    """Never stop; the default of `check` arguments, which raise to stop a long computation."""


@functools.lru_cache(maxsize=1_000_000)
def _stem(word: str) -> str:
    stem: str = Stemmer.Stemmer("porter").stemWord(word)
    return stem


def analyze(text: str) -> list[str]:
    """Return the terms of a text: lower case, without stop words, stemmed."""
    return [_stem(word) for word in _WORD.findall(text.lower()) if word not in STOP_WORDS]


@dataclass(frozen=True, slots=True)
class Bm25Index:
    """An index that is in memory."""

    docids: list[str]
    scorer: bm25s.BM25

    @classmethod
    def build(
        cls, documents: Iterable[Document], *, check: Callable[[], None] = no_check
    ) -> Bm25Index:
        """Index documents; no documents, or none with a term, is an error."""
        docids: list[str] = []
        term_ids: dict[str, int] = {}
        ids_by_document: list[list[int]] = []
        for document in documents:
            if len(docids) % _CHECK_EVERY == 0:
                check()
            docids.append(document.docid)
            terms = analyze(f"{document.title} {document.text}")
            ids_by_document.append([term_ids.setdefault(term, len(term_ids)) for term in terms])
        if not term_ids:
            raise InputError(
                f"BM25 has nothing to index: the corpus has {len(docids)} documents and no word in them"
            )
        scorer = bm25s.BM25(k1=K1, b=B, method="lucene", backend="numpy")
        scorer.index((ids_by_document, term_ids), create_empty_token=False, show_progress=False)
        return cls(docids, scorer)

    @classmethod
    def load(cls, folder: Path) -> Bm25Index:
        """Load a saved index; its arrays stay on disk until they are read."""
        scorer = bm25s.BM25.load(str(folder), mmap=True, show_progress=False)
        return cls(json.loads((folder / _DOCIDS_NAME).read_text(encoding="utf-8")), scorer)

    def save(self, folder: Path) -> None:
        """Write the index into a folder that does not exist yet."""
        self.scorer.save(str(folder), show_progress=False)
        (folder / _DOCIDS_NAME).write_text(json.dumps(self.docids), encoding="utf-8")

    def search(self, query: str, *, depth: int) -> dict[str, float]:
        """Return the best `depth` documents that share a term with the query, best first."""
        term_ids = [
            self.scorer.vocab_dict[term]
            for term in analyze(query)
            if term in self.scorer.vocab_dict
        ]
        if not term_ids:
            return {}
        scores: npt.NDArray[np.float32] = self.scorer.get_scores_from_ids(term_ids)
        return {docid: score for score, docid in self._best(scores, depth)}

    def _best(self, scores: npt.NDArray[np.float32], depth: int) -> list[tuple[float, str]]:
        found = np.flatnonzero(scores > 0)
        if len(found) > depth:
            # Everything that ties with the last place takes part, so that the docid decides the cut as well.
            place = len(found) - depth
            found = found[scores[found] >= np.partition(scores[found], place)[place]]
        return sorted(((float(scores[i]), self.docids[i]) for i in found), reverse=True)[:depth]


def search_all(
    index: Bm25Index,
    queries: Mapping[str, str],
    *,
    depth: int,
    check: Callable[[], None] = no_check,
) -> dict[str, dict[str, float]]:
    """Retrieve for every query; one that shares no term with the corpus gets an empty ranking."""
    return dict(_search_each(index, queries, depth, check))


def _search_each(
    index: Bm25Index, queries: Mapping[str, str], depth: int, check: Callable[[], None]
) -> Iterator[tuple[str, dict[str, float]]]:
    for query_id, query in queries.items():
        check()
        yield query_id, index.search(query, depth=depth)


def open_index(
    dataset: BeirFolder, *, cache: Path | None = None, check: Callable[[], None] = no_check
) -> Bm25Index:
    """Index a BEIR folder's corpus, or load the index from the cache folder where it is already there."""
    if cache is None:
        return Bm25Index.build(dataset.corpus(), check=check)
    folder = cache / "bm25" / _cache_key(dataset.corpus_path)
    if not folder.is_dir():
        _publish(Bm25Index.build(dataset.corpus(), check=check), folder)
    return Bm25Index.load(folder)


def _cache_key(corpus: Path) -> str:
    parts = {
        "corpus": sha256_file(corpus),
        "k1": K1,
        "b": B,
        "analysis": ANALYSIS_VERSION,
        "bm25s": version("bm25s"),
        "stemmer": version("PyStemmer"),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _publish(index: Bm25Index, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        index.save(beside)
        for path in beside.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        try:
            beside.rename(folder)
        except OSError:
            # Another worker indexed the same corpus meanwhile; anything else is an error.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
