"""Groups as token ids, and the loader that hands a rank its micro batches.

Owns rendering at the moment of use, so that nothing is held in memory, and the link from the trainer's step to the
epoch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypedDict

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from tevatron.core.errors import PairError
from tevatron.core.prompts import Pair, Renderer
from tevatron.trainer.program.data.rows import RowFile
from tevatron.trainer.program.data.sampling import Sampling
from tevatron.trainer.program.data.schedule import Draw, Schedule


class Group(NamedTuple):
    """The prompts of one query, the positive's first."""

    prompts: list[list[int]]
    teacher: list[float] | None
    num_groups: int
    """Groups of the whole step, over all ranks."""
    num_truncated: int
    """Prompts whose passage was cut."""


class MicroBatch(TypedDict):
    """What the trainer is handed at a time; a dict, since it looks for keys of its own in it."""

    groups: list[Group]


class GroupDataset(Dataset[Group]):
    """Makes the group of a draw."""

    def __init__(
        self, rows: RowFile, *, renderer: Renderer, sampling: Sampling, needs_teacher: bool
    ) -> None:
        self._rows = rows
        self._renderer = renderer
        self._sampling = sampling
        self._needs_teacher = needs_teacher

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, draw: Draw) -> Group:
        row = self._rows[draw.row]
        passages = self._sampling.group(row, index=draw.row, epoch=draw.epoch)
        pairs = [Pair(query=row.query, title=one.title, text=one.text) for one in passages]
        try:
            rendered = self._renderer.render_all(pairs)
        except PairError as error:
            raise type(error)(f"query '{row.query_id}': {error}") from error
        scores = [one.score for one in passages if one.score is not None]
        return Group(
            prompts=[one.ids for one in rendered],
            teacher=scores if self._needs_teacher else None,
            num_groups=draw.num_groups,
            num_truncated=sum(one.truncated_tokens > 0 for one in rendered),
        )


class MicroBatchSampler(Sampler[list[Draw]]):
    """Yields one epoch's micro batches of a rank; which epoch, it learns from the step when it is iterated."""

    def __init__(
        self, schedule: Schedule, sampling: Sampling, *, rank: int, step: Callable[[], int]
    ) -> None:
        self._schedule = schedule
        self._sampling = sampling
        self._rank = rank
        self._step = step

    def __len__(self) -> int:
        return self._schedule.steps_per_epoch * self._schedule.num_micro_batches

    def __iter__(self) -> Iterator[list[Draw]]:
        epoch = self._step() // self._schedule.steps_per_epoch
        return self._schedule.micro_batches(self._sampling, epoch=epoch, rank=self._rank)


def _collate(groups: list[Group]) -> MicroBatch:
    return MicroBatch(groups=groups)


def make_loader(
    dataset: GroupDataset, sampler: MicroBatchSampler, *, num_workers: int
) -> DataLoader[Group]:
    """Return the loader of a rank's micro batches."""
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=_collate,
        num_workers=num_workers,
        # Its own generator: iterating must not draw from the one that dropout uses.
        generator=torch.Generator(),
    )
