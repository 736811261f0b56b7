"""The table that a study ends with: a row for each reranker and cell, a column for each dataset, and the mean.

A variable whose value is the evaluated dataset goes across in place of down. A variable in which the cells of a job differ
is "-": an evaluation that no variable touches is one row, not one a cell. CQADupStack's forums are one column, as BEIR
counts them. Knows the jobs as the API tells them, not how they came there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import typer
from pydantic import JsonValue

from tevatron.core.cli.matrix import show
from tevatron.core.cli.output import print_rows
from tevatron.core.cli.study import Study
from tevatron.core.contracts.jobs import EvalJob, FailReason, From, JobKind, JobState
from tevatron.core.contracts.resources import JobResource
from tevatron.core.errors import ConfigError, unknown_name

NOTHING = "-"
FIRST_STAGE = "first stage"
_UNIT = "cqadupstack"


@dataclass(frozen=True, slots=True)
class Row:
    """One system in one cell of the matrix."""

    reranker: str
    """The job or thing whose scores order the list, or "first stage"."""
    variables: Mapping[str, str]
    jobs: dict[str, list[str]]
    """Names of the evaluations by column; several where a column is their mean."""


@dataclass(frozen=True, slots=True)
class FilledRow:
    """A row with its numbers."""

    row: Row
    values: Mapping[str, float | JobState | None]
    """By column: the value, the state of a job that has none (yet), or None where the row has no evaluation."""

    @property
    def numbers(self) -> list[float]:
        """The values that are there."""
        return [value for value in self.values.values() if isinstance(value, float)]

    @property
    def mean(self) -> float | None:
        """The mean over the columns that are there."""
        return sum(self.numbers) / len(self.numbers) if self.numbers else None

    @property
    def is_complete(self) -> bool:
        """Whether the mean is one over all columns."""
        return len(self.numbers) == len(self.values)


def rows_of(study: Study) -> list[Row]:
    """Return the table's rows; two evaluations that nothing in them tells apart are an error."""
    evaluations = {name: spec for name, spec in study.jobs.items() if isinstance(spec, EvalJob)}
    values = {name: _values(study, name) for name in evaluations}
    # An axis that touches no evaluation tells no rows apart either.
    down = [
        axis
        for axis in study.matrix.axes
        if any(
            values[name][axis] not in (NOTHING, spec.dataset) for name, spec in evaluations.items()
        )
    ]
    rows: dict[tuple[str, ...], Row] = {}
    taken: dict[tuple[str, ...], str] = {}
    for name, spec in evaluations.items():
        variables = {axis: values[name][axis] for axis in down}
        reranker = _reranker(spec, study)
        place = (reranker, *variables.values())
        other = taken.setdefault((*place, spec.dataset, spec.split), name)
        if other != name:
            raise ConfigError(
                f"evaluations '{other}' and '{name}' would be the same row ({', '.join(place)}) and column "
                f"({spec.dataset}) of the table: make what differs a variable of the matrix"
            )
        row = rows.setdefault(place, Row(reranker, variables, {}))
        row.jobs.setdefault(_column(spec), []).append(name)
    return list(rows.values())


def _values(study: Study, job: str) -> dict[str, str]:
    """Return the job's variables as texts; "-" for one in which its cells differ, or that they do not have."""
    found: dict[str, str] = {}
    for axis in study.matrix.axes:
        values = {show(cell[axis]) if axis in cell else NOTHING for cell in study.cells_of[job]}
        found[axis] = values.pop() if len(values) == 1 else NOTHING
    return found


def _reranker(spec: EvalJob, study: Study) -> str:
    if spec.rerank is None:
        return FIRST_STAGE
    checkpoint = spec.rerank.checkpoint
    if isinstance(checkpoint, From):
        return study.jobs[checkpoint.source].name or checkpoint.source
    return checkpoint or spec.rerank.model or ", ".join(spec.rerank.scorers or [])


def _column(spec: EvalJob) -> str:
    if spec.benchmark is not None and spec.benchmark.dataset.startswith(f"{_UNIT}-"):
        return _UNIT
    return spec.dataset if spec.split == "test" else f"{spec.dataset} ({spec.split})"


def shown_metric(study: Study, wanted: str | None) -> str:
    """Return the metric that the table shows: the wanted one, or the first of the first evaluation."""
    known = [
        metric
        for spec in study.jobs.values()
        if isinstance(spec, EvalJob)
        for metric in spec.metrics
    ]
    if wanted is not None and wanted not in known:
        raise ConfigError(unknown_name("metric", wanted, set(known)))
    return wanted or (known[0] if known else NOTHING)


def fill_rows(
    rows: Sequence[Row], jobs: Mapping[str, JobResource], *, metric: str
) -> list[FilledRow]:
    """Return the rows with what has come of their jobs so far."""
    columns = dict.fromkeys(column for row in rows for column in row.jobs)
    return [
        FilledRow(
            row,
            {
                column: _value([jobs[name] for name in row.jobs[column]], metric)
                if column in row.jobs
                else None
                for column in columns
            },
        )
        for row in rows
    ]


def _value(jobs: Sequence[JobResource], metric: str) -> float | JobState | None:
    """Return the mean of the evaluations, the state of one that has no result, or None where none has the metric."""
    values: list[float] = []
    for job in jobs:
        if job.state is not JobState.SUCCEEDED:
            return job.state
        metrics = (job.result or {}).get("metrics")
        value = metrics.get(metric) if isinstance(metrics, dict) else None
        if not isinstance(value, float):
            return None
        values.append(value)
    return sum(values) / len(values)


def print_study(study: Study, jobs: Mapping[str, JobResource], *, metric: str) -> None:
    """Write the table, the state of a job in place of a number that is not there, and below it why jobs failed."""
    typer.echo(f"{study.name}: {count_states(jobs)}; {metric}")
    lines = [_line(filled) for filled in fill_rows(rows_of(study), jobs, metric=metric)]
    print_rows(lines, *(lines[0] if lines else ()))
    for job in jobs.values():
        # What only waited for another one has nothing to say of its own.
        if job.state is JobState.FAILED and job.reason is not FailReason.DEPENDENCY_FAILED:
            typer.echo(f"failed: {job.name} ({job.id}): {job.reason}: {job.message}")


def _line(filled: FilledRow) -> dict[str, str]:
    line = {"reranker": filled.row.reranker, **filled.row.variables}
    for column, value in filled.values.items():
        line[column] = f"{value:.4f}" if isinstance(value, float) else str(value or NOTHING)
    if len(filled.values) > 1:
        mean = filled.mean
        line["mean"] = NOTHING if mean is None else f"{mean:.4f}"
        if mean is not None and not filled.is_complete:
            line["mean"] += f" ({len(filled.numbers)} of {len(filled.values)})"
    return line


def count_states(jobs: Mapping[str, JobResource]) -> str:
    """Return how many jobs are in which state, such as `3 of 4 jobs succeeded, 1 failed`."""
    counts = Counter(job.state for job in jobs.values())
    num_succeeded = counts.pop(JobState.SUCCEEDED, 0)
    others = "".join(f", {count} {state}" for state, count in sorted(counts.items()))
    return f"{num_succeeded} of {len(jobs)} jobs succeeded{others}"


def study_json(study: Study, jobs: Mapping[str, JobResource], *, metric: str) -> JsonValue:
    """Return the table and its jobs for programs."""
    rows: list[JsonValue] = [
        {
            "reranker": filled.row.reranker,
            "variables": dict(filled.row.variables),
            "values": {
                column: value if isinstance(value, float) else None
                for column, value in filled.values.items()
            },
            "jobs": {
                column: [jobs[name].id for name in names]
                for column, names in filled.row.jobs.items()
            },
            "mean": filled.mean,
            "is_complete": filled.is_complete,
        }
        for filled in fill_rows(rows_of(study), jobs, metric=metric)
    ]
    return {
        "name": study.name,
        "metric": metric,
        "rows": rows,
        "jobs": [job.model_dump(mode="json") for job in jobs.values()],
    }


def print_plan(study: Study) -> None:
    """Write the cells, and how many jobs of each kind they make together."""
    kinds = Counter(spec.kind for spec in study.jobs.values())
    listed = ", ".join(f"{kinds[kind]} {kind}" for kind in JobKind if kinds[kind])
    typer.echo(f"{study.name}: {len(study.matrix.cells)} cells, {len(study.jobs)} jobs ({listed})")
    names = list(dict.fromkeys(name for cell in study.matrix.cells for name in cell))
    cells = [
        {name: show(cell[name]) if name in cell else NOTHING for name in names}
        for cell in study.matrix.cells
    ]
    print_rows(cells, *names)


def plan_json(study: Study) -> JsonValue:
    """Return the cells and the jobs for programs."""
    return {
        "name": study.name,
        "cells": [dict(cell) for cell in study.matrix.cells],
        "jobs": {
            name: spec.model_dump(mode="json", by_alias=True, exclude_none=True)
            for name, spec in study.jobs.items()
        },
    }
