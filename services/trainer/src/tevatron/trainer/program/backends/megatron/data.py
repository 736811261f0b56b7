"""A replica's groups step by step, from any step on. Sampling, order and rendering are the shared ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch.utils.data import DataLoader, Sampler

from tevatron.trainer.program.data.groups import Group, GroupDataset
from tevatron.trainer.program.data.sampling import Sampling
from tevatron.trainer.program.data.schedule import Draw, Schedule


class StepSampler(Sampler[list[Draw]]):
    """Yields all draws of a step for one replica, from `first_step` to the end of the run."""

    def __init__(
        self, schedule: Schedule, sampling: Sampling, *, data_rank: int, first_step: int
    ) -> None:
        self._schedule = schedule
        self._sampling = sampling
        self._data_rank = data_rank
        self._first_step = first_step

    def __len__(self) -> int:
        return max(0, self._schedule.total_steps - self._first_step)

    def __iter__(self) -> Iterator[list[Draw]]:
        step = self._first_step
        size = self._schedule.num_micro_batches
        while step < self._schedule.total_steps:
            epoch, place = divmod(step, self._schedule.steps_per_epoch)
            batches = self._schedule.micro_batches(
                self._sampling, epoch=epoch, rank=self._data_rank
            )
            batches = islice(batches, place * size, None)
            while batch := list(islice(batches, size)):
                if step == self._schedule.total_steps:
                    return
                yield [draw for draws in batch for draw in draws]
                step += 1


def step_loader(
    dataset: GroupDataset, sampler: StepSampler, *, num_workers: int
) -> DataLoader[Group]:
    """Return the loader; each item is the list of a step's groups."""
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=list,
        num_workers=num_workers,
        # Its own generator: iterating must not draw from the one that dropout uses.
        generator=torch.Generator(),
    )
