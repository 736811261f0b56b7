"""The command `tevatron.eval.summary`: the table of a benchmark out of a folder of results, or of eval jobs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from tevatron.core.cli.client import Client
from tevatron.core.settings import Settings
from tevatron.evaluator.benchmarks import BENCHMARKS, get_benchmark
from tevatron.evaluator.console import run_command, say
from tevatron.evaluator.files import whole_file
from tevatron.evaluator.rendering import FORMATS, Format, format_of, render
from tevatron.evaluator.results import Results
from tevatron.evaluator.summary import read_evaluations, read_folder, summary_table

DEFAULT_BENCHMARK = "beir15"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def add_summary_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a benchmark's table."""
    parser.add_argument(
        "--benchmark",
        default=DEFAULT_BENCHMARK,
        help=f"{', '.join(BENCHMARKS)} (default: {DEFAULT_BENCHMARK})",
    )
    parser.add_argument("--name", help="of the system (default: the folder's)")
    parser.add_argument(
        "--columns", nargs="+", help="metrics to show, such as ndcg@10 (default: the benchmark's)"
    )
    parser.add_argument(
        "--allow_partial",
        action="store_true",
        help="average over the data sets that are there, marked as such",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tevatron.eval.summary",
        description="Write the table of a benchmark.",
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--results_dir", type=Path, help="folder of the results")
    source.add_argument(
        "--jobs",
        metavar="NAME",
        help="eval jobs of this name, the newest of each data set, from the API (TEVATRON_URL)",
    )
    add_summary_flags(parser)
    parser.add_argument(
        "--output", type=Path, required=True, help=f"table to write: {', '.join(FORMATS)}"
    )
    return parser


def _run(arguments: argparse.Namespace) -> None:
    form = format_of(arguments.output)
    benchmark = get_benchmark(arguments.benchmark)
    partial = arguments.allow_partial
    if arguments.jobs is None:
        name = arguments.results_dir.resolve().name
        results = read_folder(benchmark, arguments.results_dir, may_lack=partial)
    else:
        name = arguments.jobs
        with Client.from_settings(Settings.from_environment()) as client:
            results = read_evaluations(benchmark, client.evaluations(), name, may_lack=partial)
    write_summary(arguments, results, arguments.output, name=name, form=form)


def write_summary(
    arguments: argparse.Namespace,
    results: Mapping[str, Results],
    output: Path,
    *,
    name: str,
    form: Format,
) -> None:
    """Write and show the table that the flags ask for."""
    benchmark = get_benchmark(arguments.benchmark)
    table = summary_table(
        benchmark,
        results,
        title=f"{arguments.name or name}: {benchmark.title}",
        columns=arguments.columns or benchmark.columns,
        allow_partial=arguments.allow_partial,
    )
    text = render(table, form)
    with whole_file(output) as path:
        path.write_text(text, encoding="utf-8")
    say(render(table, Format.MARKDOWN))
