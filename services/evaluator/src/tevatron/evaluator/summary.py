"""The table of a benchmark out of a folder of `<data set>.metrics.json`: a row a unit, and the average of all of them.

An average over fewer data sets than the benchmark has is refused, or shown as what it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import JsonValue

from tevatron.core.contracts.resources import EvaluationResource
from tevatron.core.errors import InputError
from tevatron.evaluator.benchmarks import Average, Benchmark
from tevatron.evaluator.metrics import parse_metric
from tevatron.evaluator.results import Results, read_results
from tevatron.evaluator.sweep import METRICS_SUFFIX
from tevatron.evaluator.table import Cell, Row, Table


def read_folder(
    benchmark: Benchmark, folder: Path, *, may_lack: bool = False
) -> dict[str, Results]:
    """Return the results of the benchmark's data sets; one that is missing is an error unless some may lack."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    found = {
        name: read_results(path)
        for name in benchmark.names()
        if (path := folder / f"{name}{METRICS_SUFFIX}").is_file()
    }
    _check_one_system({name: _scorer_of(folder, name) for name in found}, where=str(folder))
    _check_complete(benchmark, found, where=str(folder), may_lack=may_lack)
    return found


def read_evaluations(
    benchmark: Benchmark,
    evaluations: Iterable[EvaluationResource],
    name: str,
    *,
    may_lack: bool = False,
) -> dict[str, Results]:
    """Return the results of eval jobs of one name over the benchmark's data sets, as `read_folder` does.

    Args:
        evaluations: Newest first; of each data set the first one counts.
    """
    newest: dict[str, EvaluationResource] = {}
    for entry in evaluations:
        of = entry.benchmark
        if entry.name == name and of is not None and of["name"] == benchmark.name:
            newest.setdefault(str(of["dataset"]), entry)
    found = {
        dataset: Results(dataset=dataset, means=newest[dataset].metrics, values={})
        for dataset in benchmark.names()
        if dataset in newest
    }
    where = f"the evaluations named '{name}'"
    _check_one_system({dataset: _reranker_of(newest[dataset]) for dataset in found}, where=where)
    _check_complete(benchmark, found, where=where, may_lack=may_lack)
    return found


def _check_complete(
    benchmark: Benchmark, found: Mapping[str, Results], *, where: str, may_lack: bool
) -> None:
    missing = [name for name in benchmark.names() if name not in found]
    if missing and not (may_lack and found):
        raise InputError(
            f"{where}: results of {len(found)} of {len(benchmark.names())} data sets of {benchmark.name}; missing are "
            f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}; an average over the others is not the "
            "benchmark's (--allow_partial)"
        )


def _scorer_of(folder: Path, name: str) -> JsonValue:
    """Return what made a result, as its file says; the reference's does not."""
    cache = json.loads((folder / f"{name}{METRICS_SUFFIX}").read_bytes()).get("cache")
    scoring = cache.get("scoring") if isinstance(cache, dict) else None
    scorer: JsonValue = scoring.get("scorer") if isinstance(scoring, dict) else None
    return scorer


def _reranker_of(entry: EvaluationResource) -> JsonValue:
    """Return what decides the scores of an evaluation, however many candidates were reranked."""
    if entry.rerank is None:
        return None
    rerank = {key: value for key, value in entry.rerank.items() if key != "depth"}
    return {**rerank, "checkpoint": entry.checkpoint_id, "model": entry.model_id}


def _check_one_system(scorers: Mapping[str, JsonValue], *, where: str) -> None:
    """Refuse results of several scorers: their average is no system's."""
    for name, scorer in scorers.items():
        first = next(iter(scorers))
        if scorer != scorers[first]:
            raise InputError(
                f"{where}: the results of {first} and {name} are of different systems: {json.dumps(scorers[first])} and "
                f"{json.dumps(scorer)}; run all of it again, or under another name"
            )


def summary_table(
    benchmark: Benchmark,
    results: Mapping[str, Results],
    *,
    title: str,
    columns: Sequence[str],
    allow_partial: bool = False,
) -> Table:
    """Put the benchmark's units against metrics, their mean last.

    Args:
        title: What the table is about.
        columns: Metrics.
        allow_partial: Average over what is there, and say so; without it a partial average is left out.
    """
    shown = [str(parse_metric(column)) for column in columns]
    averages = [_average(benchmark, results, column) for column in shown]
    missing = [entry for entry in benchmark.names() if entry not in results]
    rows = []
    for place, unit in enumerate(benchmark.units):
        is_partial = any(entry in missing for entry in unit.datasets)
        values = [average.rows[place].value for average in averages]
        if is_partial and not allow_partial:
            values = [None] * len(shown)
        rows.append(Row(unit.label, [Cell(value, is_partial=is_partial) for value in values]))
    notes = []
    if missing:
        what = "the average is not the benchmark's" if allow_partial else "there is no average"
        notes.append(
            f"partial: {len(missing)} of {len(benchmark.names())} data sets are missing ({', '.join(missing)}); {what}"
        )
    if not missing or allow_partial:
        there = sum(any(entry in results for entry in unit.datasets) for unit in benchmark.units)
        of = f"{there} of {len(benchmark.units)}" if missing else str(there)
        cells = [Cell(average.value, is_partial=bool(missing)) for average in averages]
        rows.append(Row(f"average of {of}", cells, is_total=True))
    return Table(title=title, corner="data set", columns=shown, rows=rows, notes=notes)


def _average(benchmark: Benchmark, results: Mapping[str, Results], column: str) -> Average:
    values = {}
    for name, result in results.items():
        if column not in result.means:
            raise InputError(
                f"the results of {name} have no {column}; there are: {', '.join(result.means)}"
            )
        values[name] = result.means[column]
    return benchmark.average(values)
