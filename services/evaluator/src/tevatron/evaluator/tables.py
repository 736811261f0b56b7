"""Tables of systems side by side: systems against metrics on one data set, a benchmark's units against systems.

Knows numbers and names, not where they come from; `rendering` writes a table as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tevatron.core.errors import ConfigError, unknown_name
from tevatron.evaluator.benchmarks import Benchmark
from tevatron.evaluator.rendering import DIGITS, Format, render
from tevatron.evaluator.significance import ALPHA, NUM_SWAPS, Comparison, compare_pairs, holm
from tevatron.evaluator.table import RANDOMISATION_MARK, T_MARK, Cell, Row, Table

AVERAGE = "average"

_Key = tuple[str, str]
"""A system's name, and the metric or the unit of a number."""


@dataclass(frozen=True, slots=True)
class System:
    """A system on one data set: its metrics, `ndcg@10` to value, and where they are there those of each query."""

    name: str
    metrics: Mapping[str, float]
    values: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metric -> query id -> value."""


def compare(
    systems: Sequence[System], metrics: Sequence[str], *, first_stage: str | None = None
) -> str:
    """Render systems by metrics as markdown, without notes; see `by_metric`."""
    table = by_metric(systems, metrics, first_stage=first_stage)
    return render(replace(table, notes=[]), Format.MARKDOWN)


def by_metric(
    systems: Sequence[System],
    metrics: Sequence[str],
    *,
    title: str = "",
    first_stage: str | None = None,
) -> Table:
    """Put systems against metrics on one data set.

    Args:
        systems: With values of each query, they are tested against the first stage.
        metrics: Columns.
        title: What the table is about.
        first_stage: Name of the system that the others are compared with.
    """
    names = [system.name for system in systems]
    _check_first_stage(first_stage, names)
    base = next((system for system in systems if system.name == first_stage), None)
    tests = _corrected(
        {
            (system.name, metric): (system.values[metric], base.values[metric])
            for system in systems
            for metric in metrics
            if base is not None and system is not base
            if metric in system.values and metric in base.values
        }
    )
    values = {(s.name, metric): s.metrics[metric] for s in systems for metric in s.metrics}
    cells = _cells(names, metrics, values, first_stage=first_stage, tests=tests)
    rows = [Row(name, [cells[name, metric] for metric in metrics]) for name in names]
    return Table(
        title=title,
        corner="system",
        columns=list(metrics),
        rows=rows,
        notes=_notes(first_stage, tests),
    )


def by_dataset(
    benchmark: Benchmark,
    systems: Mapping[str, Mapping[str, System]],
    metric: str,
    *,
    first_stage: str | None = None,
) -> Table:
    """Put a benchmark's units against systems, their mean last; units that no system has are left out.

    Args:
        benchmark: Whose units and averages.
        systems: Name -> data set -> that system there. What lacks data sets is marked as partial.
        metric: Which one.
        first_stage: Name of the system that the others are compared with.
    """
    _check_first_stage(first_stage, systems)
    values: dict[_Key, float] = {}
    partial: set[_Key] = set()
    notes = []
    for name, sets in systems.items():
        average = benchmark.average(
            {d: system.metrics[metric] for d, system in sets.items() if metric in system.metrics}
        )
        for label, value, missing in (*average.rows, (AVERAGE, average.value, average.missing)):
            if value is not None:
                values[name, label] = value
                partial |= {(name, label)} if missing else set()
        if average.missing:
            notes.append(
                f"partial: {name} has no value of {len(average.missing)} of {len(benchmark.datasets)} data sets, such as "
                f"{', '.join(average.missing[:3])}"
            )
    tests = _corrected(_pairs_by_unit(benchmark, systems, metric, first_stage))
    labels = [
        unit.label for unit in benchmark.units if any((n, unit.label) in values for n in systems)
    ]
    cells = _cells(
        systems, [*labels, AVERAGE], values, first_stage=first_stage, tests=tests, partial=partial
    )
    return Table(
        title=f"{benchmark.title}, {metric}",
        corner="data set",
        columns=list(systems),
        rows=[
            Row(label, [cells[name, label] for name in systems], is_total=label == AVERAGE)
            for label in (*labels, AVERAGE)
        ],
        notes=[*_notes(first_stage, tests), *notes],
    )


def _pairs_by_unit(
    benchmark: Benchmark,
    systems: Mapping[str, Mapping[str, System]],
    metric: str,
    first_stage: str | None,
) -> dict[_Key, tuple[Mapping[str, float], Mapping[str, float]]]:
    """Return both sides' values by query of units that are one data set; a mean of several has no queries."""
    if first_stage is None:
        return {}
    base = systems[first_stage]
    found = {}
    for unit in benchmark.units:
        dataset = unit.datasets[0]
        if len(unit.datasets) > 1 or dataset not in base or metric not in base[dataset].values:
            continue
        for name, sets in systems.items():
            if name != first_stage and dataset in sets and metric in sets[dataset].values:
                found[name, unit.label] = sets[dataset].values[metric], base[dataset].values[metric]
    return found


def _check_first_stage(first_stage: str | None, names: Iterable[str]) -> None:
    if first_stage is not None and first_stage not in names:
        raise ConfigError(unknown_name("system", first_stage, names))


def _corrected(
    pairs: Mapping[_Key, tuple[Mapping[str, float], Mapping[str, float]]],
) -> dict[_Key, Comparison]:
    """Test every pair; each test's p values are corrected over all pairs of the table."""
    found = {key: compare_pairs(*pair) for key, pair in pairs.items()}
    t_tests = holm([tests.t_test for tests in found.values()])
    randomisations = holm([tests.randomisation for tests in found.values()])
    return {
        key: Comparison(*corrected)
        for key, *corrected in zip(found, t_tests, randomisations, strict=True)
    }


def _cells(
    systems: Iterable[str],
    items: Sequence[str],
    values: Mapping[_Key, float],
    *,
    first_stage: str | None,
    tests: Mapping[_Key, Comparison],
    partial: set[_Key] | None = None,
) -> dict[_Key, Cell]:
    cells = {}
    for item in items:
        column = {name: values[name, item] for name in systems if (name, item) in values}
        # What shows the same number is as good as the best.
        best = max((round(value, DIGITS) for value in column.values()), default=None)
        first = None if first_stage is None else column.get(first_stage)
        for name in systems:
            value = column.get(name)
            cells[name, item] = Cell(
                value=value,
                delta=None
                if value is None or first is None or name == first_stage
                else value - first,
                is_best=value is not None and round(value, DIGITS) == best,
                tests=tests.get((name, item)),
                is_partial=(name, item) in (partial or set()),
            )
    return cells


def _notes(first_stage: str | None, tests: Mapping[_Key, Comparison]) -> list[str]:
    if first_stage is None:
        return []
    notes = [f"beside a value: its change from {first_stage}"]
    if tests:
        notes.append(
            f"{T_MARK} differs from {first_stage} by the paired t-test, {RANDOMISATION_MARK} by the randomisation test "
            f"({NUM_SWAPS} swaps): p < {ALPHA}, two-sided, Holm-corrected over this table's comparisons ({len(tests)})"
        )
    return notes
