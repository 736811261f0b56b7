"""What a benchmark is: data sets with their expected counts, and units whose plain mean is the headline.

Knows names, counts and averages; not where judgments lie (`sources`), nor how a metric is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tevatron.core.errors import ConfigError, InputError, unknown_name
from tevatron.core.formats.qrels import Qrels
from tevatron.evaluator.metrics import Run, remove_identical

DISAGREEMENT = 1e-4
"""A stored sub-average further than this from the mean of its parts is reported; values are stored with 4 or 5 digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One set of judgments."""

    name: str
    split: str = "test"
    num_queries: int | None = None
    """Judged queries; checked on load where it is known."""
    num_relevant: int | None = None
    """Judgments of grade 1 or higher; checked on load where it is known. Copies differ in the zeros that they keep."""
    relevance_level: int = 1
    """Grade from which binary metrics take a document as relevant; nDCG does not look at it."""
    drops_identical: bool = False
    """Whether a document with its query's id is dropped from a run: the queries stand in the corpus too."""
    drops_excluded: bool = False
    """Whether the set names, per query, documents that are dropped from a run (BRIGHT's `excluded_ids`)."""
    files: tuple[str, ...] = ()
    """More places of its judgments below a folder, without `.gz` or `.zst`; see `sources.places_of`."""
    hub_id: str | None = None
    """Data set of the hub with `qrels/<split>.tsv` or `.jsonl`."""

    def check(self, qrels: Qrels, *, origin: str) -> None:
        """Refuse judgments whose counts are not the expected ones: another split, or another version."""
        found = {
            "judged queries": (len(qrels), self.num_queries),
            "relevant judgments": (
                sum(grade > 0 for grades in qrels.values() for grade in grades.values()),
                self.num_relevant,
            ),
        }
        for what, (got, expected) in found.items():
            if expected is not None and got != expected:
                raise InputError(
                    f"{origin}: these are not the judgments of {self.name} ({self.split}): expected {expected} {what}, "
                    f"got {got}; is it another split or version?"
                )


class Unit(NamedTuple):
    """One row of the table and one term of the headline: the plain mean of its data sets."""

    label: str
    datasets: tuple[str, ...]


class Row(NamedTuple):
    """A unit's value."""

    label: str
    value: float | None
    """Mean of the data sets that are there; none where none is."""
    missing: tuple[str, ...] = ()
    """Data sets of the unit that have no value: the row is partial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """A benchmark's values of one metric."""

    rows: list[Row]
    value: float | None
    """Mean over the units that have a value."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Data sets without a value; where there is one, `value` is not the benchmark's."""
        return tuple(name for row in self.rows for name in row.missing)


class Disagreement(NamedTuple):
    """A sub-average that is stored somewhere and is not the mean of its parts."""

    label: str
    stored: float
    computed: float

    def __str__(self) -> str:
        return (
            f"{self.label}: the stored value {self.stored:.5f} is not the mean of its parts, {self.computed:.5f} "
            f"({self.stored - self.computed:+.5f})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A named set of data sets."""

    name: str
    title: str
    datasets: tuple[Dataset, ...]
    units: tuple[Unit, ...] = ()
    """Each data set is a unit of its own when empty."""
    columns: tuple[str, ...] = ("ndcg@10", "recall@100")
    """Metrics that its tables show, the main one first."""
    _by_name: dict[str, Dataset] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that the units are made of the data sets, each in one place."""
        by_name = {dataset.name: dataset for dataset in self.datasets}
        object.__setattr__(self, "_by_name", by_name)
        if not self.units:
            object.__setattr__(self, "units", tuple(Unit(name, (name,)) for name in by_name))
        members = [name for unit in self.units for name in unit.datasets]
        if sorted(members) != sorted(entry.name for entry in self.datasets):
            raise ConfigError(
                f"benchmark '{self.name}': every data set must stand in exactly one unit; data sets {sorted(by_name)}, "
                f"in units {sorted(members)}"
            )

    def dataset(self, name: str) -> Dataset:
        """Return a data set by its name."""
        if name not in self._by_name:
            raise ConfigError(unknown_name(f"data set of {self.name}", name, self._by_name))
        return self._by_name[name]

    def names(self) -> tuple[str, ...]:
        """Return the names of all data sets, in order."""
        return tuple(self._by_name)

    def average(self, values: Mapping[str, float]) -> Average:
        """Average data sets' values of one metric: within each unit, then over the units.

        Args:
            values: Data set to value. Missing ones are told in the result; an unknown one is an error.
        """
        for name in values:
            self.dataset(name)
        rows = [_row(unit, values) for unit in self.units]
        return Average(rows=rows, value=_mean(row.value for row in rows if row.value is not None))

    def disagreements(
        self, values: Mapping[str, float], stored: Mapping[str, float]
    ) -> list[Disagreement]:
        """Compare sub-averages that stand elsewhere with the means of their parts.

        Args:
            values: Data set to value.
            stored: Label of a unit of several data sets to the value that stands for it somewhere.
        """
        found = []
        for row in self.average(values).rows:
            claim = stored.get(row.label)
            if claim is None or row.value is None or row.missing:
                continue
            if abs(claim - row.value) > DISAGREEMENT:
                found.append(Disagreement(row.label, claim, row.value))
        return found


def prepare_run(
    dataset: Dataset, run: Run, *, excluded: Mapping[str, Iterable[str]] | None = None
) -> tuple[Run, int]:
    """Drop what the data set's rules drop from a run; return the run and how many documents went.

    Args:
        dataset: Whose rules.
        run: Is left as it is.
        excluded: Query to documents that do not count for it, where the data set names them.
    """
    dropped = 0
    if dataset.drops_identical:
        run, dropped = remove_identical(run)
    if dataset.drops_excluded and excluded:
        before = sum(map(len, run.values()))
        unwanted = {qid: set(docids) for qid, docids in excluded.items()}
        run = {
            qid: {d: score for d, score in scores.items() if d not in unwanted.get(qid, ())}
            for qid, scores in run.items()
        }
        dropped += before - sum(map(len, run.values()))
    return run, dropped


def _row(unit: Unit, values: Mapping[str, float]) -> Row:
    present = [values[name] for name in unit.datasets if name in values]
    return Row(unit.label, _mean(present), tuple(n for n in unit.datasets if n not in values))


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return math.fsum(found) / len(found) if found else None
