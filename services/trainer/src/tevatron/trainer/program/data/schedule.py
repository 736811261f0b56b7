"""Which rows each rank trains on in each step. Arithmetic on counts; knows no text and no tensors.

A step takes the next rows of the epoch's order, whatever the number of ranks and micro batches, so that these do not
change what is learnt. The last step of an epoch may be short; every rank still gets every micro batch, some of them
empty.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tevatron.trainer.program.data.sampling import Sampling


class Draw(NamedTuple):
    """One group to be made: a row in an epoch, and how many groups its whole step has over all ranks."""

    epoch: int
    row: int
    num_groups: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps of a run; `micro_batch` counts queries a rank and micro batch."""

    num_rows: int
    micro_batch: int
    num_micro_batches: int
    num_ranks: int
    num_epochs: float
    max_steps: int
    """-1 means by epochs."""

    @property
    def groups_per_step(self) -> int:
        """Queries of a full step over all ranks."""
        return self.micro_batch * self.num_micro_batches * self.num_ranks

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the rows, the short one included."""
        return math.ceil(self.num_rows / self.groups_per_step)

    @property
    def total_steps(self) -> int:
        """Steps of the run."""
        if self.max_steps > 0:
            return self.max_steps
        return math.ceil(self.num_epochs * self.steps_per_epoch)

    def micro_batches(self, sampling: Sampling, *, epoch: int, rank: int) -> Iterator[list[Draw]]:
        """Yield the rank's micro batches of an epoch, `num_micro_batches` a step."""
        order = sampling.order(self.num_rows, epoch=epoch)
        for start in range(0, self.num_rows, self.groups_per_step):
            rows = order[start : start + self.groups_per_step]
            own = rows[rank :: self.num_ranks]
            for batch in range(self.num_micro_batches):
                chosen = own[batch * self.micro_batch : (batch + 1) * self.micro_batch]
                yield [Draw(epoch, row, len(rows)) for row in chosen]
