"""The command `tevatron.eval.metrics`: reads judgments and a ranked list, writes metrics.json in the reference's form."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tevatron.core.formats.beir import read_split
from tevatron.core.formats.candidates import read_run
from tevatron.core.formats.qrels import read_qrels
from tevatron.core.settings import Settings
from tevatron.evaluator.benchmarks import (
    BENCHMARKS,
    Dataset,
    folder_benchmark,
    get_benchmark,
    load_excluded,
    load_qrels,
    prepare_run,
)
from tevatron.evaluator.console import note, run_command, say
from tevatron.evaluator.metrics import (
    WITHOUT_CUTOFF,
    Metric,
    MetricName,
    Metrics,
    Qrels,
    evaluate,
    parse_metric,
)
from tevatron.evaluator.overlap import check_overlap
from tevatron.evaluator.rendering import markdown
from tevatron.evaluator.results import as_json, write_results

DEFAULT_K_VALUES = (10, 100, 200, 1000)
DEFAULT_BENCHMARK = "beir15"
JUDGMENTS = "benchmarks"
"""Where benchmarks' judgments lie below `TEVATRON_DATA`, unless a folder is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """Judgments, and whose they are."""

    dataset: Dataset
    qrels: Qrels
    excluded: Mapping[str, set[str]] | None = None
    benchmark: str | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tevatron.eval.metrics",
        description="Compute retrieval metrics of a ranked list, as trec_eval -c does.",
    )
    judged = parser.add_mutually_exclusive_group(required=True)
    judged.add_argument(
        "--qrels",
        type=Path,
        help="judgments: TREC's 4 columns, BEIR's tsv or JSON lines, plain, gz or zst",
    )
    judged.add_argument(
        "--dataset", help="data set of the benchmark, such as scifact, or a BEIR folder"
    )
    parser.add_argument(
        "--benchmark",
        default=DEFAULT_BENCHMARK,
        help=f"whose data set: {', '.join(BENCHMARKS)} (default: {DEFAULT_BENCHMARK})",
    )
    parser.add_argument(
        "--beir_cache_dir",
        type=Path,
        default=None,
        help="folder with the benchmark's judgments, as BEIR folders or TREC files (default: benchmarks in TEVATRON_DATA)",
    )
    parser.add_argument(
        "--split", default="test", help="which qrels of a BEIR folder (default: test)"
    )
    parser.add_argument(
        "--ranklist",
        type=Path,
        required=True,
        help="3 columns (query_id docid score), TREC's 6, rerank.jsonl or RankLLM's JSON; plain, gz or zst",
    )
    parser.add_argument("--output", type=Path, required=True, help="metrics.json to write")
    parser.add_argument(
        "--k_values",
        type=int,
        nargs="+",
        default=list(DEFAULT_K_VALUES),
        help="cut-offs (default: 10 100 200 1000)",
    )
    parser.add_argument(
        "--relevance_level",
        type=int,
        default=None,
        help="grade from which a document is relevant; nDCG does not look at it (default: the data set's, else 1)",
    )
    parser.add_argument(
        "--remove_query",
        action="store_true",
        help="drop ranked documents that carry their query's id; of ArguAna and Quora they are dropped anyway",
    )
    parser.add_argument(
        "--per_query", action="store_true", help="write the values of every query, too"
    )
    return parser


def _run(arguments: argparse.Namespace) -> None:
    ks = sorted(set(arguments.k_values))
    wanted = all_metrics(ks)
    judged = _read_judgments(arguments)
    level = arguments.relevance_level
    if level is None:
        level = judged.dataset.relevance_level
    run, num_removed = prepare_run(
        judged.dataset, read_run(arguments.ranklist), excluded=judged.excluded
    )
    if num_removed:
        note(f"{num_removed} documents that must not count for their query were removed")
    check_overlap(judged.qrels, run)
    found = evaluate(judged.qrels, run, wanted, relevance_level=level)
    document = {
        "dataset": judged.dataset.name,
        "benchmark": judged.benchmark,
        "split": None if arguments.qrels else judged.dataset.split,
        **as_json(found, wanted, per_query=arguments.per_query),
        "n_removed": num_removed,
    }
    write_results(arguments.output, document)
    _report(found)
    say(_table(judged.dataset.name, found, ks))


def all_metrics(ks: Sequence[int]) -> list[Metric]:
    """Return every metric at these cut-offs, those without a cut-off once."""
    return [
        parse_metric(name.value if k is None else f"{name.value}@{k}")
        for name in MetricName
        for k in ([None] if name in WITHOUT_CUTOFF else ks)
    ]


def _read_judgments(arguments: argparse.Namespace) -> _Judged:
    drops = arguments.remove_query
    if arguments.qrels is not None:
        dataset = Dataset(name=arguments.qrels.name, drops_identical=drops)
        return _Judged(dataset=dataset, qrels=read_qrels(arguments.qrels))
    settings = Settings.from_environment()
    if Path(arguments.dataset).is_dir():
        (dataset,) = folder_benchmark(Path(arguments.dataset), split=arguments.split).datasets
        qrels = read_split(arguments.dataset, arguments.split)
        return _Judged(dataset=_dropping(dataset, drops), qrels=qrels)
    folder = arguments.beir_cache_dir or settings.data / JUDGMENTS
    dataset = get_benchmark(arguments.benchmark).dataset(arguments.dataset)
    excluded = load_excluded(dataset, folder=folder) if dataset.drops_excluded else None
    if dataset.drops_excluded and excluded is None:
        note(
            f"{folder} has no exclude.{dataset.name}.txt: documents that must not count are taken as gone from the run"
        )
    return _Judged(
        dataset=_dropping(dataset, drops),
        qrels=load_qrels(dataset, folder=folder, allow_hub=settings.allow_hub),
        excluded=excluded,
        benchmark=arguments.benchmark,
    )


def _dropping(dataset: Dataset, drops: bool) -> Dataset:
    return dataclasses.replace(dataset, drops_identical=drops or dataset.drops_identical)


def _table(title: str, found: Metrics, ks: Sequence[int]) -> str:
    rows = []
    for name in MetricName:
        if name in WITHOUT_CUTOFF:
            shown = [f"{found.means[name.value]:.4f}", *([""] * (len(ks) - 1))]
        else:
            shown = [f"{found.means[f'{name.value}@{k}']:.4f}" for k in ks]
        rows.append([name.value, *shown])
    return markdown([title, *(f"@{k}" for k in ks)], rows)


def _report(found: Metrics) -> None:
    if found.missing_queries:
        note(
            f"{len(found.missing_queries)} of {found.num_queries_qrels} judged queries are not in the run and count 0, "
            f"such as {found.missing_queries[:3]}"
        )
    if found.extra_queries:
        note(
            f"{len(found.extra_queries)} queries of the run are not judged and are ignored, "
            f"such as {found.extra_queries[:3]}"
        )
    if found.num_tied:
        note(f"{found.num_tied} ranked documents tie with another one; ties go by docid descending")
