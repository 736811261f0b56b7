"""What a table is: rows of cells with values, deltas, the best and what paired tests say. Knows no file format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tevatron.evaluator.significance import ALPHA, Comparison

T_MARK = "*"
RANDOMISATION_MARK = "†"


class Cell(NamedTuple):
    """One number and what is said about it."""

    value: float | None
    delta: float | None = None
    """To the system that the others are compared with."""
    is_best: bool = False
    tests: Comparison | None = None
    """Corrected p values against that system."""
    is_partial: bool = False
    """Whether data sets are missing in the mean."""

    @property
    def marks(self) -> str:
        """Return a mark for each test that finds a difference."""
        if self.tests is None:
            return ""
        t_test = T_MARK if self.tests.t_test < ALPHA else ""
        return t_test + (RANDOMISATION_MARK if self.tests.randomisation < ALPHA else "")


class Row(NamedTuple):
    """A label and its cells, one a column."""

    label: str
    cells: list[Cell]
    is_total: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows below columns."""

    title: str = ""
    corner: str
    """What the rows' labels are."""
    columns: list[str]
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    """Stand below: what marks mean, what is missing."""
