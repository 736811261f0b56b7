"""Which passages of a row make its group in an epoch, and in which order the rows come.

Pure functions of seed, epoch and row: no global random state, nothing that differs between processes or Python
versions. Over the epochs the negatives sweep the row's whole pool.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from tevatron.core.formats.training import Passage, TrainingRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How groups are drawn; `group_size` counts the positive."""

    seed: int
    group_size: int
    first_positive: bool = False
    """Always take the first positive."""
    first_negatives: bool = False
    """Always take the first negatives."""

    def group(self, row: TrainingRow, *, index: int, epoch: int) -> list[Passage]:
        """Return the group of the row at `index`: the positive, then the negatives."""
        return [
            self._positive(row, index=index, epoch=epoch),
            *self._negatives(row, index=index, epoch=epoch),
        ]

    def order(self, num_rows: int, *, epoch: int) -> list[int]:
        """Return the rows' indices in the order of that epoch."""
        order = list(range(num_rows))
        self._random("order", epoch).shuffle(order)
        return order

    def _positive(self, row: TrainingRow, *, index: int, epoch: int) -> Passage:
        place = 0 if self.first_positive else index + self.seed + epoch
        return row.positives[place % len(row.positives)]

    def _negatives(self, row: TrainingRow, *, index: int, epoch: int) -> list[Passage]:
        wanted = self.group_size - 1
        pool = row.negatives
        if wanted == 0:
            return []
        if len(pool) < wanted:
            # All of them once, then again at random: the group's size is fixed.
            again = self._random("again", index, epoch).choices(pool, k=wanted - len(pool))
            return [*pool, *again]
        if self.first_negatives:
            return pool[:wanted]
        shuffled = list(pool)
        self._random("negatives", index).shuffle(shuffled)
        start = epoch * wanted % len(pool)
        return (shuffled + shuffled)[start : start + wanted]

    def _random(self, purpose: str, *numbers: int) -> random.Random:
        # A string seed goes through SHA-512, the same everywhere; hash() does not.
        words = ":".join(str(number) for number in (self.seed, *numbers))
        return random.Random(f"tevatron:{purpose}:{words}")
