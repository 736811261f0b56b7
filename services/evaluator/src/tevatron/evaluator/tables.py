"""Markdown tables of evaluations. Rounds for people; knows numbers and names, not where they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tevatron.core.errors import ConfigError, unknown_name


@dataclass(frozen=True, slots=True)
class System:
    """One row: a name and its metrics, `ndcg@10` to value."""

    name: str
    metrics: Mapping[str, float]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Render a table; every column but the first is aligned right."""
    cells = [[_escape(cell) for cell in row] for row in (header, *rows)]
    widths = [max(3, *(len(row[column]) for row in cells)) for column in range(len(header))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [
            row[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
        ]
        for row in (cells[0], rule, *cells[1:])
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def compare(
    systems: Sequence[System], metrics: Sequence[str], *, first_stage: str | None = None
) -> str:
    """Render systems by metrics, the best of each in bold; with a first stage, what each adds to it in brackets."""
    base: Mapping[str, float] = {}
    if first_stage is not None:
        named = {system.name: system.metrics for system in systems}
        if first_stage not in named:
            raise ConfigError(unknown_name("system", first_stage, named))
        base = named[first_stage]
    best = {
        metric: max(
            (f"{s.metrics[metric]:.4f}" for s in systems if metric in s.metrics), default=""
        )
        for metric in metrics
    }
    rows = []
    for system in systems:
        row = [system.name]
        for metric in metrics:
            delta = base.get(metric) if system.name != first_stage else None
            row.append(_cell(system.metrics.get(metric), best=best[metric], first=delta))
        rows.append(row)
    return markdown(["system", *metrics], rows)


def _cell(value: float | None, *, best: str, first: float | None) -> str:
    if value is None:
        return "-"
    # What shows the same number is as good as the best.
    shown = f"**{value:.4f}**" if f"{value:.4f}" == best else f"{value:.4f}"
    return shown if first is None else f"{shown} ({value - first:+.4f})"


def _escape(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
