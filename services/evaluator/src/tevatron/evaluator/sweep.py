"""A benchmark's data sets one after the other: reranked where scorers are given, evaluated, and never twice.

Each data set leaves `<name>.metrics.json`, and `<name>.rerank.text` where it was reranked. A result is taken again only
where everything that it was made of is the same by content: the run, the judgments, what the scorers serve, the metrics
and the rules. File names decide nothing. Scores are kept in a log until their data set is done, so that whoever is killed
scores nothing twice. Knows files and the pool, not flags and tables.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import JsonValue, ValidationError

from tevatron.core.contracts.scores import Candidate
from tevatron.core.errors import ConfigError, FormatError, InputError
from tevatron.core.formats.candidates import read_candidates, read_run
from tevatron.core.formats.files import sha256_file
from tevatron.core.formats.ranklist import write_ranklist
from tevatron.core.process import die_with_parent
from tevatron.evaluator.benchmarks import (
    Benchmark,
    Dataset,
    load_excluded,
    load_qrels,
    prepare_run,
)
from tevatron.evaluator.files import whole_file
from tevatron.evaluator.hashes import qrels_sha256
from tevatron.evaluator.metrics import Metric, Qrels, Run, evaluate
from tevatron.evaluator.overlap import check_overlap
from tevatron.evaluator.pool import Backend, PoolOptions
from tevatron.evaluator.results import as_json, write_results
from tevatron.evaluator.score_log import ScoreLog
from tevatron.evaluator.scoring import score_all
from tevatron.evaluator.served import Served

MOST_PROCESSES = 4
"""Data sets evaluated at a time; each process holds a whole run."""
METRICS_SUFFIX = ".metrics.json"
RERANK_SUFFIX = ".rerank.text"
_SCORES = "scores"

Tell = Callable[[str], None]
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What is computed, and where it lies."""

    benchmark: Benchmark
    metrics: Sequence[Metric]
    per_query: Sequence[Metric]
    """Of those, the ones whose values for each query are kept: what two systems are compared by."""
    results_dir: Path
    qrels_dir: Path
    """Folder with the judgments; see `benchmarks.load_qrels`."""
    allow_hub: bool = False
    overwrite: bool = False
    """Do everything again."""


class Reranking(NamedTuple):
    """Who reranks."""

    backends: Sequence[Backend]
    served: Served
    """What all of them serve."""
    pool: PoolOptions


class _Judgments(NamedTuple):
    qrels: Qrels
    excluded: Mapping[str, set[str]] | None


class _Open(NamedTuple):
    """A data set whose candidates are still to be scored."""

    dataset: Dataset
    path: Path
    input_sha256: str
    num_pairs: int


class Sweep:
    """One sweep over a benchmark."""

    def __init__(self, options: SweepOptions, *, tell: Tell) -> None:
        self._options = options
        self._tell = tell
        self._judgments: dict[str, _Judgments] = {}

    def score(self, inputs: Mapping[str, Path]) -> None:
        """Evaluate the runs as they are, several at a time."""
        # The longest first, so that no process is left with it alone.
        ordered = sorted(inputs.items(), key=lambda entry: -entry[1].stat().st_size)
        with _locked(self._options.results_dir), _workers(len(ordered)) as pool:
            results = pool.map(_score_one, ((self._options, *entry) for entry in ordered))
            for number, (notes, fault) in enumerate(results, start=1):
                if fault is not None:
                    raise InputError(fault)
                for text in notes:
                    self._tell(text)
                self._tell(f"{number} of {len(ordered)} data sets")

    def score_one(self, name: str, path: Path) -> None:
        """Evaluate one run."""
        dataset = self._options.benchmark.dataset(name)
        key = self._key(dataset, run_sha256=sha256_file(path), scoring=None)
        if self._options.overwrite or self._cache(name) != key:
            self._evaluate(dataset, read_run(path), key)
        else:
            self._tell(f"{name}: nothing has changed")

    def rerank(
        self,
        inputs: Mapping[str, Path],
        reranking: Reranking,
        *,
        make_progress: Callable[[int], Callable[[int], None]],
    ) -> None:
        """Score the candidates of each data set, and evaluate what comes out.

        Args:
            make_progress: Gets the number of pairs to score; returns what is told the number done so far.
        """
        with _locked(self._options.results_dir):
            todo = self._open_inputs(inputs, reranking.served)
            progress, before = make_progress(sum(entry.num_pairs for entry in todo)), 0
            for entry in todo:
                self._rerank_one(entry, reranking, _added(progress, before))
                before += entry.num_pairs

    def _open_inputs(self, inputs: Mapping[str, Path], served: Served) -> list[_Open]:
        """Return what is still to be scored, read once; evaluate again what needs nothing else."""
        todo = []
        for name, path in inputs.items():
            dataset = self._options.benchmark.dataset(name)
            input_sha256 = sha256_file(path)
            run_path = self._run_path(name)
            scoring = _scoring_key(input_sha256, served)
            known = None if self._options.overwrite else self._cache(name)
            if (
                known is not None
                and known.get("scoring") == scoring
                and run_path.is_file()
                and sha256_file(run_path) == known.get("run_sha256")
            ):
                key = self._key(dataset, run_sha256=str(known["run_sha256"]), scoring=scoring)
                if known != key:
                    self._evaluate(dataset, read_run(run_path), key)
                self._tell(f"{name}: taken from {run_path.name}, made of the same by the same")
                continue
            todo.append(_Open(dataset, path, input_sha256, self._count_pairs(dataset, path)))
        return todo

    def _count_pairs(self, dataset: Dataset, path: Path) -> int:
        """Read the candidates, so that a fault is found before anything is scored; return their number."""
        queries: dict[str, dict[str, float]] = {}
        num_pairs = 0
        for row in read_candidates(path):
            num_pairs += 1
            documents = queries.setdefault(row.query_id, {})
            if row.docid in documents:
                raise FormatError(
                    f"document '{row.docid}' is given twice for query '{row.query_id}'", path=path
                )
            documents[row.docid] = 0.0
        _named(dataset, lambda: check_overlap(self._judged(dataset).qrels, queries))
        return num_pairs

    def _rerank_one(
        self, entry: _Open, reranking: Reranking, on_progress: Callable[[int], None]
    ) -> None:
        name, log_path = entry.dataset.name, self._log_path(entry.dataset.name)
        if self._options.overwrite:
            log_path.unlink(missing_ok=True)
        with ScoreLog(log_path, identity=name) as log:
            log.served_by(reranking.served.identity)
            run = score_all(
                reranking.backends,
                _candidates(entry.path),
                log,
                served=reranking.served,
                options=reranking.pool,
                on_progress=on_progress,
            )
        with whole_file(self._run_path(name)) as path:
            write_ranklist(path, run)
        key = self._key(
            entry.dataset,
            run_sha256=sha256_file(self._run_path(name)),
            scoring=_scoring_key(entry.input_sha256, reranking.served),
        )
        self._evaluate(entry.dataset, run, key)
        # From here on the ranked list itself is what is taken again.
        log_path.unlink()
        self._tell(f"{name}: {entry.num_pairs} pairs reranked")

    def _judged(self, dataset: Dataset) -> _Judgments:
        if dataset.name not in self._judgments:
            options = self._options
            excluded = (
                load_excluded(dataset, folder=options.qrels_dir) if dataset.drops_excluded else None
            )
            qrels = load_qrels(dataset, folder=options.qrels_dir, allow_hub=options.allow_hub)
            self._judgments[dataset.name] = _Judgments(qrels, excluded)
        return self._judgments[dataset.name]

    def _key(
        self, dataset: Dataset, *, run_sha256: str, scoring: dict[str, JsonValue] | None
    ) -> dict[str, JsonValue]:
        """Return everything on which the numbers depend."""
        judged = self._judged(dataset)
        excluded = None
        if judged.excluded is not None:
            excluded = qrels_sha256(
                {qid: dict.fromkeys(sorted(docids), 0) for qid, docids in judged.excluded.items()}
            )
        return {
            "run_sha256": run_sha256,
            "qrels_sha256": qrels_sha256(judged.qrels),
            "scoring": scoring,
            "metrics": [str(metric) for metric in self._options.metrics],
            "per_query": [str(metric) for metric in self._options.per_query],
            "relevance_level": dataset.relevance_level,
            "drops_identical": dataset.drops_identical,
            "excluded_sha256": excluded,
            "computed_by": f"pytrec_eval-terrier {version('pytrec-eval-terrier')}",
        }

    def _cache(self, name: str) -> dict[str, JsonValue] | None:
        """Return what the data set's result was made of; None where there is none, or not one of ours."""
        try:
            document = json.loads(self._metrics_path(name).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        cache = document.get("cache") if isinstance(document, dict) else None
        return cache if isinstance(cache, dict) else None

    def _evaluate(self, dataset: Dataset, run: Run, key: dict[str, JsonValue]) -> None:
        judged = self._judged(dataset)
        metrics = self._options.metrics
        _named(dataset, lambda: check_overlap(judged.qrels, run))
        run, num_removed = prepare_run(dataset, run, excluded=judged.excluded)
        found = _named(
            dataset,
            lambda: evaluate(judged.qrels, run, metrics, relevance_level=dataset.relevance_level),
        )
        if found.missing_queries:
            self._tell(
                f"{dataset.name}: {len(found.missing_queries)} of {found.num_queries_qrels} judged queries have no "
                f"results and count 0, such as {found.missing_queries[:3]}"
            )
        write_results(
            self._metrics_path(dataset.name),
            {
                "dataset": dataset.name,
                "benchmark": self._options.benchmark.name,
                "split": dataset.split,
                **as_json(found, metrics),
                "n_removed": num_removed,
                "per_query": {str(m): dict(found.values[str(m)]) for m in self._options.per_query},
                "cache": key,
            },
        )

    def _metrics_path(self, name: str) -> Path:
        return self._options.results_dir / f"{name}{METRICS_SUFFIX}"

    def _run_path(self, name: str) -> Path:
        return self._options.results_dir / f"{name}{RERANK_SUFFIX}"

    def _log_path(self, name: str) -> Path:
        return self._options.results_dir / _SCORES / f"{name}.jsonl"


def _score_one(work: tuple[SweepOptions, str, Path]) -> tuple[list[str], str | None]:
    """Evaluate one run in a process of its own; return what there is to tell, and what is wrong with the input."""
    options, name, path = work
    notes: list[str] = []
    try:
        Sweep(options, tell=notes.append).score_one(name, path)
    except InputError as error:
        # Its text: not every error of ours survives the way between processes.
        return notes, str(error)
    return notes, None


@contextmanager
def _workers(num_jobs: int) -> Iterator[Executor]:
    """Give processes that end with this one."""
    number = min(len(os.sched_getaffinity(0)), MOST_PROCESSES, num_jobs)
    # Forked, so that what is imported need not be imported again; no thread runs here.
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(
        number, mp_context=context, initializer=die_with_parent, initargs=(os.getpid(),)
    )
    with pool:
        yield pool


def _scoring_key(input_sha256: str, served: Served) -> dict[str, JsonValue]:
    return {"input_sha256": input_sha256, "scorer": json.loads(served.identity)}


def _candidates(path: Path) -> Iterator[Candidate]:
    for row in read_candidates(path):
        try:
            yield Candidate(
                query_id=row.query_id,
                docid=row.docid,
                query=row.query,
                title=row.title,
                text=row.text,
            )
        except ValidationError as error:
            raise InputError(
                f"{path}: query '{row.query_id[:100]}', document '{row.docid[:100]}' cannot be sent to a scorer: "
                f"{error.errors(include_url=False)[0]['msg']}"
            ) from error


def _added(progress: Callable[[int], None], before: int) -> Callable[[int], None]:
    return lambda done: progress(before + done)


def _named(dataset: Dataset, work: Callable[[], Found]) -> Found:
    """Do `work`; what it finds wrong with the input names the data set."""
    try:
        return work()
    except InputError as error:
        raise InputError(f"{dataset.name}: {error}") from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep a second sweep out of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another sweep works in {folder}") from None
        yield
