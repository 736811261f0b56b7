"""The command `tevatron.eval.run`, with the reference's flags: a benchmark's runs scored, or reranked and scored."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.evaluator.backends import Progress, add_backend_flags, backends_of, pool_options
from tevatron.evaluator.benchmarks import Benchmark, get_benchmark
from tevatron.evaluator.console import note, run_command
from tevatron.evaluator.inputs import find_inputs
from tevatron.evaluator.metrics import Metric, MetricName, parse_metric
from tevatron.evaluator.metrics_command import DEFAULT_K_VALUES, JUDGMENTS
from tevatron.evaluator.pool import learn_served
from tevatron.evaluator.rendering import format_of
from tevatron.evaluator.summary import read_folder
from tevatron.evaluator.summary_command import add_summary_flags, write_summary
from tevatron.evaluator.sweep import Reranking, Sweep, SweepOptions

FAMILIES = (
    MetricName.NDCG,
    MetricName.MAP,
    MetricName.MRR,
    MetricName.RECALL,
    MetricName.PRECISION,
)
"""Metrics of every data set, at all cut-offs: the reference's. Others are computed where a column shows them."""
SUMMARY_NAME = "summary.md"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tevatron.eval.run",
        description="Evaluate a system on a benchmark: its runs as they are, or reranked by scorers first. Begun again, it "
        "goes on where it was.",
        allow_abbrev=False,
    )
    parser.add_argument("--results_dir", type=Path, required=True, help="gets the results")
    add_summary_flags(parser)
    parser.add_argument(
        "--ranklist_pattern",
        metavar="PATH",
        help="runs to score, such as runs/{dataset}/rank.text; also .gz and .zst",
    )
    parser.add_argument(
        "--ranklist_override",
        nargs="+",
        default=[],
        metavar="DATASET=PATH",
        help="runs of their own",
    )
    parser.add_argument(
        "--rerank_input_pattern",
        metavar="PATH",
        help="candidates to rerank with --backends, such as runs/{dataset}/rerank.jsonl",
    )
    parser.add_argument(
        "--rerank_input_override",
        nargs="+",
        default=[],
        metavar="DATASET=PATH",
        help="candidates of their own",
    )
    add_backend_flags(parser, required=False)
    parser.add_argument(
        "--chunk_size", type=int, default=2000, help="most pairs in a request (default: 2000)"
    )
    parser.add_argument("--datasets", nargs="+", default=[], help="some of the benchmark's only")
    parser.add_argument(
        "--output", type=Path, help=f"table to write (default: {SUMMARY_NAME} among the results)"
    )
    parser.add_argument(
        "--k_values",
        type=int,
        nargs="+",
        help="cut-offs (default: 10 100 200 1000 and those of the columns)",
    )
    parser.add_argument(
        "--beir_cache_dir",
        type=Path,
        help=f"folder with the benchmark's judgments (default: {JUDGMENTS} in TEVATRON_DATA)",
    )
    parser.add_argument("--overwrite", action="store_true", help="do everything again")
    return parser


def _run(arguments: argparse.Namespace) -> None:
    benchmark = get_benchmark(arguments.benchmark)
    output = arguments.output or arguments.results_dir / SUMMARY_NAME
    form = format_of(output)
    settings = Settings.from_environment()
    columns = [parse_metric(text) for text in arguments.columns or benchmark.columns]
    sweep = Sweep(
        SweepOptions(
            benchmark=benchmark,
            metrics=_metrics(arguments, columns),
            per_query=columns,
            results_dir=arguments.results_dir,
            qrels_dir=arguments.beir_cache_dir or settings.data / JUDGMENTS,
            allow_hub=settings.allow_hub,
            overwrite=arguments.overwrite,
        ),
        tell=note,
    )
    if arguments.backends:
        _rerank(arguments, benchmark, sweep)
    else:
        _score(arguments, benchmark, sweep)
    results = read_folder(
        benchmark,
        arguments.results_dir,
        may_lack=arguments.allow_partial or bool(arguments.datasets),
    )
    name = arguments.results_dir.resolve().name
    write_summary(arguments, results, output, name=name, form=form)


def _rerank(arguments: argparse.Namespace, benchmark: Benchmark, sweep: Sweep) -> None:
    if arguments.ranklist_pattern or arguments.ranklist_override:
        raise ConfigError(
            "--backends rerank the candidates of --rerank_input_pattern; --ranklist_pattern scores runs as they are: give "
            "one of the two"
        )
    inputs = _inputs(
        arguments,
        benchmark,
        pattern=arguments.rerank_input_pattern,
        overrides=arguments.rerank_input_override,
        flag="--rerank_input_pattern",
    )
    backends = backends_of(arguments.backends)
    pool = pool_options(arguments, chunk_size=arguments.chunk_size)
    served = learn_served(backends, options=pool)
    sweep.rerank(
        inputs,
        Reranking(backends, served, pool),
        make_progress=lambda total: Progress(total, "pairs"),
    )


def _score(arguments: argparse.Namespace, benchmark: Benchmark, sweep: Sweep) -> None:
    if arguments.rerank_input_pattern or arguments.rerank_input_override:
        raise ConfigError(
            "--rerank_input_pattern needs --backends URL ..., which score the candidates"
        )
    inputs = _inputs(
        arguments,
        benchmark,
        pattern=arguments.ranklist_pattern,
        overrides=arguments.ranklist_override,
        flag="--ranklist_pattern",
    )
    sweep.score(inputs)


def _inputs(
    arguments: argparse.Namespace,
    benchmark: Benchmark,
    *,
    pattern: str | None,
    overrides: Sequence[str],
    flag: str,
) -> dict[str, Path]:
    if pattern is None and not overrides:
        raise ConfigError(f"expected {flag} PATH with {{dataset}} in it, or {flag[:-8]}_override")
    named: dict[str, Path] = {}
    for entry in overrides:
        name, separator, path = entry.partition("=")
        if not separator or not name or not path:
            raise ConfigError(f"{flag[:-8]}_override: expected DATASET=PATH, got '{entry}'")
        named[name] = Path(path).expanduser()
    partial = arguments.allow_partial
    return find_inputs(
        benchmark, arguments.datasets, pattern=pattern, overrides=named, allow_partial=partial
    )


def _metrics(arguments: argparse.Namespace, columns: Sequence[Metric]) -> list[Metric]:
    """Return the reference's metrics at every cut-off that is asked for, and the columns."""
    ks = arguments.k_values or [
        *DEFAULT_K_VALUES,
        *(column.k for column in columns if column.k is not None),
    ]
    usual = [Metric(name, k) for name in FAMILIES for k in sorted(set(ks))]
    return list(dict.fromkeys([*usual, *columns]))
