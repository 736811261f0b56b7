"""The benchmark registry: names to entries. A benchmark more is one entry here."""

from __future__ import annotations

from pathlib import Path

from tevatron.core.errors import ConfigError, unknown_name
from tevatron.evaluator.benchmarks.base import (
    Average,
    Benchmark,
    Dataset,
    Disagreement,
    Row,
    Unit,
    prepare_run,
)
from tevatron.evaluator.benchmarks.beir15 import BEIR15
from tevatron.evaluator.benchmarks.bright import BRIGHT
from tevatron.evaluator.benchmarks.mteb import MTEB_RERANKING, MTEB_RETRIEVAL
from tevatron.evaluator.benchmarks.sources import load_excluded, load_qrels
from tevatron.evaluator.benchmarks.trec_dl import DL19, DL20

BENCHMARKS: dict[str, Benchmark] = {
    benchmark.name: benchmark
    for benchmark in (BEIR15, DL19, DL20, BRIGHT, MTEB_RERANKING, MTEB_RETRIEVAL)
}

__all__ = [
    "BENCHMARKS",
    "Average",
    "Benchmark",
    "Dataset",
    "Disagreement",
    "Row",
    "Unit",
    "folder_benchmark",
    "get_benchmark",
    "load_excluded",
    "load_qrels",
    "prepare_run",
]


def get_benchmark(name: str) -> Benchmark:
    """Return a benchmark by its name; an unknown one is an error that lists them."""
    if name not in BENCHMARKS:
        raise ConfigError(unknown_name("benchmark", name, BENCHMARKS))
    return BENCHMARKS[name]


def folder_benchmark(path: Path, *, split: str = "test") -> Benchmark:
    """Return a benchmark of one data set, a BEIR folder; its judgments load with `folder=path.parent`."""
    name = path.resolve().name
    return Benchmark(name=name, title=name, datasets=(Dataset(name=name, split=split),))
