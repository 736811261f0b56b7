"""How results look: tables for people, JSON for programs. Knows resources, not HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TypeVar

import typer
from pydantic import BaseModel, JsonValue
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tevatron.core.contracts.jobs import JobState
from tevatron.core.contracts.resources import EvaluationComparison, EvaluationResource, JobResource

STATE_STYLES = {
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "red",
    JobState.CANCELLED: "yellow",
    JobState.CANCELLING: "yellow",
    JobState.RUNNING: "cyan",
    JobState.STARTING: "cyan",
}

METRIC_KINDS = (
    "ndcg",
    "map",
    "mrr",
    "recall",
    "capped_recall",
    "precision",
    "success",
    "rprec",
    "judged",
)

Printed = TypeVar("Printed", bound=BaseModel)
Columns = Mapping[str, Callable[[Printed], str]]
"""What a table's columns are called, and what stands in them for a resource."""


def print_json(content: JsonValue) -> None:
    """Write one JSON document to standard output."""
    typer.echo(json.dumps(content, indent=1))


def dump(items: Sequence[Printed]) -> list[JsonValue]:
    """Return resources as JSON values."""
    return [item.model_dump(mode="json") for item in items]


def print_table(table: Table) -> None:
    """Write a table to standard output; where that is no terminal, as wide as it needs."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=240)
    console.print(table)


def table(*columns: str) -> Table:
    """Return an empty table without borders at its sides."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def _add(made: Table, *cells: str | Text) -> None:
    """Add a row; a user's text is never read as markup."""
    made.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def print_rows(rows: Sequence[Mapping[str, str]], *columns: str) -> None:
    """Write rows as a table; says so where there is none."""
    if not rows:
        typer.echo("none", err=True)
        return
    made = table(*columns)
    for row in rows:
        _add(made, *(row[column] for column in columns))
    print_table(made)


def show(found: Sequence[Printed], columns: Columns[Printed], *, json: bool) -> None:
    """Write resources as a table, or as JSON."""
    if json:
        print_json(dump(found))
        return
    rows = [{name: text(entry) for name, text in columns.items()} for entry in found]
    print_rows(rows, *columns)


def print_jobs(jobs: Sequence[JobResource]) -> None:
    """Write one line for each job."""
    made = table("job", "kind", "name", "priority", "state", "attempt", "took", "result")
    for job in jobs:
        state = Text(job.state, style=STATE_STYLES.get(job.state, ""))
        _add(
            made,
            job.id,
            job.kind,
            job.name or "-",
            str(job.priority),
            state,
            str(job.attempt),
            _took(job),
            outcome(job),
        )
    print_table(made)


def outcome(job: JobResource) -> str:
    """Say in a few words what came of a job."""
    if job.state is JobState.FAILED:
        return f"{job.reason}: {job.message}"
    if job.held_back is not None:
        return f"held back: {job.held_back}"
    if job.result is None:
        return str(job.phase) if job.phase and job.state is JobState.RUNNING else ""
    if isinstance(metrics := job.result.get("metrics"), dict):
        return ", ".join(
            f"{name} {value:.4f}"
            for name in in_order(metrics)[:2]
            if isinstance(value := metrics[name], float)
        )
    return str(job.result.get("checkpoint_id") or job.result.get("dataset_id") or "")


def _took(job: JobResource) -> str:
    if job.started_at is None:
        return ""
    seconds = ((job.finished_at or datetime.now(UTC)) - job.started_at).total_seconds()
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def print_evaluations(
    evaluations: Sequence[EvaluationResource],
    *,
    names: Mapping[str, str],
    metrics: Sequence[str] | None = None,
) -> None:
    """Write systems against metrics, a table for each dataset, with deltas to the first stage.

    Args:
        evaluations: Newest first.
        names: What to call a thing, by its id.
        metrics: Which ones; all of a dataset's evaluations when unset.
    """
    groups: dict[tuple[str, str], list[EvaluationResource]] = {}
    for entry in reversed(evaluations):
        groups.setdefault((entry.dataset_id, entry.split), []).append(entry)
    for (dataset_id, split), entries in groups.items():
        shown = list(metrics or in_order(name for entry in entries for name in entry.metrics))
        # No title of the table, which would be folded to the table's width.
        typer.echo(
            f"{names.get(dataset_id, dataset_id)} ({split}, {entries[0].num_queries} queries)"
        )
        made = table("system", *shown)
        for entry in entries:
            base = _first_stage_metrics(entry)
            cells = [_cell(name, entry, base) for name in shown]
            _add(made, system_name(entry, names=names), *cells)
        print_table(made)


def print_comparison(
    found: EvaluationComparison, *, names: Mapping[str, str], metrics: Sequence[str] | None = None
) -> None:
    """Write an evaluation against another one: means, the change, and the queries won and lost."""
    by_metric = {entry.metric: entry for entry in found.metrics}
    first, second = (
        system_name(entry, names=names) for entry in (found.baseline, found.evaluation)
    )
    typer.echo(
        f"{names.get(found.evaluation.dataset_id, found.evaluation.dataset_id)} ({found.evaluation.split}, "
        f"{found.evaluation.num_queries} queries): {second} against {first}"
    )
    made = table("metric", first, second, "change", "won", "lost", "same")
    for name in metrics or in_order(by_metric):
        entry = by_metric[name]
        _add(
            made,
            name,
            f"{entry.baseline:.4f}",
            f"{entry.value:.4f}",
            f"{entry.delta:+.4f}",
            str(entry.num_won),
            str(entry.num_lost),
            str(entry.num_same),
        )
    print_table(made)


def system_name(entry: EvaluationResource, *, names: Mapping[str, str]) -> str:
    """Return the evaluation's name, else what made it."""
    if entry.name:
        return entry.name
    first = str(entry.first_stage.get("kind", "first stage"))
    reranker = entry.checkpoint_id or entry.model_id
    if entry.rerank is None:
        return first
    return f"{first} + {names.get(reranker, reranker) if reranker else 'scorer'}"


def in_order(metrics: Iterable[str]) -> list[str]:
    """Return each metric once, nDCG first and by cut-off; Postgres does not keep an order."""

    def place(metric: str) -> tuple[int, int, str]:
        kind, _, cutoff = metric.partition("@")
        known = METRIC_KINDS.index(kind) if kind in METRIC_KINDS else len(METRIC_KINDS)
        return known, int(cutoff) if cutoff.isdecimal() else 0, metric

    return sorted(set(metrics), key=place)


def _first_stage_metrics(entry: EvaluationResource) -> Mapping[str, float]:
    """Return the metrics of the very list that `entry` reranks; none where it reranks nothing."""
    found = entry.first_stage.get("metrics") if entry.rerank is not None else None
    if not isinstance(found, dict):
        return {}
    return {name: value for name, value in found.items() if isinstance(value, float)}


def _cell(name: str, entry: EvaluationResource, base: Mapping[str, float]) -> str:
    value = entry.metrics.get(name)
    if value is None:
        return "-"
    delta = f" ({value - base[name]:+.4f})" if name in base else ""
    return f"{value:.4f}{delta}"
