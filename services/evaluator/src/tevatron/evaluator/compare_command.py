"""The command `tevatron.eval.compare`: several systems' results side by side, as a table, lists of queries and plots.

A system is a folder of `<data set>.metrics.json`, as sweeps leave them, one such file, or the id of an evaluation that the
API has. Knows no run and no judgments.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from tevatron.core.cli.client import Client
from tevatron.core.errors import ConfigError, InputError, unknown_name
from tevatron.core.settings import Settings
from tevatron.evaluator.benchmarks import BENCHMARKS, get_benchmark
from tevatron.evaluator.console import note, run_command, say
from tevatron.evaluator.differences import Differences, QueryDifference, differences
from tevatron.evaluator.files import whole_file
from tevatron.evaluator.metrics import parse_metric
from tevatron.evaluator.plots import bars, waterfall
from tevatron.evaluator.rendering import FORMATS, Format, format_of, render
from tevatron.evaluator.results import Results, read_results
from tevatron.evaluator.table import Table
from tevatron.evaluator.tables import System, by_dataset, by_metric

SUFFIX = ".metrics.json"
EVALUATION = "eval_"
"""What the id of a stored evaluation begins with."""
MAX_SHOWN = 5
"""Queries won and lost that are named."""

_Systems = dict[str, dict[str, System]]
"""Name -> data set -> the system there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tevatron.eval.compare",
        description="Put systems side by side: deltas to the first stage, paired tests, queries won and lost, plots.",
    )
    parser.add_argument(
        "systems",
        nargs="+",
        metavar="NAME=PATH",
        help=f"results of a system: a folder of <data set>{SUFFIX}, one such file, or the id of a stored evaluation; "
        "without NAME= the path's own name",
    )
    parser.add_argument(
        "--first_stage",
        default=None,
        metavar="NAME",
        help="system that the others are compared with and tested against",
    )
    parser.add_argument(
        "--benchmark", default=None, help=f"units and averages: {', '.join(BENCHMARKS)}"
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=["ndcg@10"],
        help="columns on one data set; of a benchmark the first alone (default: ndcg@10)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        action="append",
        default=[],
        help=f"file to write, by its ending: {', '.join(FORMATS)}; may be given several times",
    )
    parser.add_argument(
        "--differences",
        type=Path,
        default=None,
        help="csv file for what each query gained or lost against the first stage",
    )
    parser.add_argument(
        "--bars", type=Path, default=None, help=".png or .svg file for a bar plot of the table"
    )
    parser.add_argument(
        "--waterfall",
        type=Path,
        default=None,
        help=".png or .svg file for the queries' changes; takes one system beside the first stage, on one data set",
    )
    return parser


def _run(arguments: argparse.Namespace) -> None:
    for path in arguments.output:
        format_of(path)
    metrics = [str(parse_metric(text)) for text in arguments.metrics]
    systems = _read(arguments.systems)
    if arguments.first_stage is not None and arguments.first_stage not in systems:
        raise ConfigError(unknown_name("system", arguments.first_stage, systems))
    table = _table(systems, metrics, benchmark=arguments.benchmark, first=arguments.first_stage)
    say(render(table, Format.MARKDOWN))
    for path in arguments.output:
        _write(path, render(table, format_of(path)))
    if arguments.bars is not None:
        bars(table, arguments.bars)
    found = _differences(systems, metrics[0], arguments.first_stage)
    for (name, dataset), pair in found.items():
        text = (
            f"{name} against {arguments.first_stage} on {dataset}, {metrics[0]}: {pair.summary()}\n"
        )
        say(text + _named("won", pair.won) + _named("lost", pair.lost))
    if arguments.differences is not None:
        _write_differences(arguments.differences, _needed(found, "--differences"), metrics[0])
    if arguments.waterfall is not None:
        if len(_needed(found, "--waterfall")) != 1:
            raise ConfigError(
                f"--waterfall takes one system beside the first stage, on one data set; got {len(found)} such pairs"
            )
        (((name, dataset), pair),) = found.items()
        title = f"{name} against {arguments.first_stage}, {dataset}, {metrics[0]}"
        waterfall(pair, arguments.waterfall, title=title)


def _read(texts: Sequence[str]) -> _Systems:
    systems: _Systems = {}
    for text in texts:
        name, is_named, place = text.partition("=")
        place = place if is_named else text
        name = name if is_named else Path(place).name.removesuffix(SUFFIX)
        if name in systems:
            raise ConfigError(f"two systems are called '{name}': name one with NAME=PATH")
        is_stored = place.startswith(EVALUATION) and not Path(place).exists()
        found = [_read_evaluation(place)] if is_stored else _read_files(Path(place))
        systems[name] = {entry.dataset: System(name, entry.means, entry.values) for entry in found}
        if len(systems[name]) < len(found):
            raise InputError(f"{place}: there are several results of one data set")
    return systems


def _read_files(path: Path) -> list[Results]:
    files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: expected files <data set>{SUFFIX}, got none")
    return [read_results(file) for file in files]


def _read_evaluation(evaluation_id: str) -> Results:
    with Client.from_settings(Settings.from_environment()) as client:
        found = client.evaluation(evaluation_id)
        values: dict[str, dict[str, float]] = {}
        for entry in client.evaluation_values(evaluation_id):
            values.setdefault(entry.metric, {})[entry.query_id] = entry.value
    dataset = found.dataset_id if found.benchmark is None else str(found.benchmark["dataset"])
    return Results(dataset=dataset, means=found.metrics, values=values)


def _table(
    systems: _Systems, metrics: Sequence[str], *, benchmark: str | None, first: str | None
) -> Table:
    datasets = sorted({dataset for sets in systems.values() for dataset in sets})
    known = {
        name for sets in systems.values() for system in sets.values() for name in system.metrics
    }
    for metric in metrics:
        if metric not in known:
            raise InputError(unknown_name("metric", metric, known))
    if benchmark is not None:
        entry = get_benchmark(benchmark)
        units = {unit.label for unit in entry.units if len(unit.datasets) > 1}
        for name, sets in systems.items():
            stored = {label: sets.pop(label).metrics for label in units & sets.keys()}
            values = {
                d: system.metrics[metrics[0]]
                for d, system in sets.items()
                if metrics[0] in system.metrics
            }
            claims = {
                label: found[metrics[0]] for label, found in stored.items() if metrics[0] in found
            }
            for disagreement in entry.disagreements(values, claims):
                note(f"{name}: {disagreement}")
        return by_dataset(entry, systems, metrics[0], first_stage=first)
    if len(datasets) > 1:
        raise ConfigError(
            f"results of {len(datasets)} data sets, such as {', '.join(datasets[:3])}: name the --benchmark that averages them"
        )
    (dataset,) = datasets
    rows = [sets[dataset] for sets in systems.values()]
    return by_metric(rows, metrics, title=dataset, first_stage=first)


def _differences(
    systems: _Systems, metric: str, first: str | None
) -> dict[tuple[str, str], Differences]:
    """Compare each system with the first stage on each data set where both have values of each query."""
    if first is None:
        return {}
    return {
        (name, dataset): differences(before.values[metric], system.values[metric])
        for name, sets in systems.items()
        if name != first
        for dataset, system in sets.items()
        if (before := systems[first].get(dataset)) is not None
        and metric in before.values
        and metric in system.values
    }


def _needed(
    found: Mapping[tuple[str, str], Differences], flag: str
) -> Mapping[tuple[str, str], Differences]:
    if not found:
        raise ConfigError(
            f"{flag} needs --first_stage, and results with the values of each query (tevatron.eval.metrics --per_query)"
        )
    return found


def _named(word: str, queries: Sequence[QueryDifference]) -> str:
    lines = [
        f"  {word} {query.query_id}: {query.before:.4f} -> {query.after:.4f} ({query.delta:+.4f})\n"
        for query in queries[:MAX_SHOWN]
    ]
    return "".join(lines)


def _write(path: Path, text: str) -> None:
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")


def _write_differences(
    path: Path, found: Mapping[tuple[str, str], Differences], metric: str
) -> None:
    with whole_file(path) as beside, beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["system", "data set", "query_id", "metric", "before", "after", "delta"])
        for (name, dataset), pair in found.items():
            for query in pair.queries:
                writer.writerow(
                    [
                        name,
                        dataset,
                        query.query_id,
                        metric,
                        repr(query.before),
                        repr(query.after),
                        repr(query.delta),
                    ]
                )
