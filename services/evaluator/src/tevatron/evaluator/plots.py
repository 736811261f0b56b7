"""Plots as PNG or SVG: bars of a table, and what each query gained or lost. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tevatron.core.errors import ConfigError
from tevatron.evaluator.differences import Differences
from tevatron.evaluator.files import whole_file
from tevatron.evaluator.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#000000")
"""Okabe and Ito's, which colour-blind readers tell apart."""
GAIN, LOSS = "#009e73", "#d55e00"
_DPI = 150


def bars(table: Table, path: Path) -> None:
    """Draw a group of bars for each row of `table`, a bar for each column."""
    num_places = len(table.rows) * (len(table.columns) + 1)
    figure, axes = _figure(width=min(16.0, max(6.0, 0.18 * num_places)))
    width = 0.8 / len(table.columns)
    for place, column in enumerate(table.columns):
        values = [row.cells[place].value for row in table.rows]
        shown = [(x, value) for x, value in enumerate(values) if value is not None]
        axes.bar(
            [x + (place - (len(table.columns) - 1) / 2) * width for x, _ in shown],
            [value for _, value in shown],
            width,
            label=column,
            color=COLOURS[place % len(COLOURS)],
        )
    labels = [row.label for row in table.rows]
    axes.set_xticks(range(len(labels)), labels)
    if len(labels) > 4:
        for label in axes.get_xticklabels():
            label.set(rotation=40, ha="right", rotation_mode="anchor")
    axes.margins(x=0.01)
    axes.set_title(table.title)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    _save(figure, path)


def waterfall(found: Differences, path: Path, *, title: str) -> None:
    """Draw every query's change, greatest gain first."""
    figure, axes = _figure(width=7.0)
    deltas = [query.delta for query in found.queries]
    # One outline a side: 7,000 bars would make a file of megabytes.
    for colour, side in (
        (GAIN, [max(d, 0.0) for d in deltas]),
        (LOSS, [min(d, 0.0) for d in deltas]),
    ):
        axes.stairs(side, range(len(deltas) + 1), fill=True, color=colour)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xlim(0, max(len(deltas), 1))
    axes.set_title(title)
    axes.set_xlabel(found.summary())
    axes.set_ylabel("change")
    axes.grid(axis="y", alpha=0.3)
    _save(figure, path)


def _figure(*, width: float) -> tuple[Figure, Axes]:
    try:
        # Optional and heavy. No pyplot: it keeps every figure, and asks for a screen.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "plots need matplotlib, which is not installed: pip install 'tevatron-evaluator[plots]'"
        ) from error
    figure = Figure(figsize=(width, 4.5), layout="constrained")
    return figure, figure.add_subplot()


def _save(figure: Figure, path: Path) -> None:
    import matplotlib as mpl  # optional and heavy

    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"a plot is written as {' or '.join(SUFFIXES)}, got '{path.name}'")
    form = path.suffix.lower().removeprefix(".")
    # The same numbers give the same file: no date, no random ids.
    with whole_file(path) as beside, mpl.rc_context({"svg.hashsalt": "tevatron"}):
        metadata = {"Date": None} if form == "svg" else {}
        figure.savefig(beside, format=form, dpi=_DPI, metadata=metadata)
