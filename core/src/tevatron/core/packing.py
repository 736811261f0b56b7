"""Packing by token budget: which prompts share a forward pass. Knows lengths, not tensors."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

UNEVEN = 0.005
"""By how much of the mean the fullest bin may stand out before swaps are tried; many short items are under it anyway."""
MOST_SWAPS = 100
NEAREST = 16
"""How many of the emptiest bins a swap is looked for in."""


def pack(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Place items into few bins of at most `max_tokens`, evenly filled; return their indices by bin.

    Best-fit decreasing finds how many bins are enough; longest-first onto the emptiest bin then levels them, and swaps
    out of the fullest one level the rest, so that ranks and passes take alike long. An item longer than the budget gets
    a bin of its own. Every index appears exactly once; equal input gives equal output.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    long = [[index] for index in order if lengths[index] > max_tokens]
    order = order[len(long) :]
    bins = _best_fit(lengths, order, max_tokens)
    level = _fill(lengths, order, num_bins=len(bins))
    if all(sum(lengths[index] for index in indices) <= max_tokens for indices in level):
        bins = level
    return sorted(sorted(indices) for indices in long + bins)


def spread(lengths: Sequence[int], *, num_bins: int) -> list[list[int]]:
    """Place items into so many bins, evenly filled, however much that is; return their indices by bin.

    The longest go first, each onto the emptiest bin, and swaps out of the fullest one level the rest. Every index
    appears exactly once; equal input gives equal output; a bin is empty where there are more bins than items.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    return [sorted(indices) for indices in _fill(lengths, order, num_bins=num_bins)]


def waste(lengths: Sequence[int], bins: Sequence[Sequence[int]]) -> float:
    """Return the share of tokens that would be padding if every bin were padded to the fullest one."""
    filled = [sum(lengths[index] for index in indices) for indices in bins]
    return 1 - sum(filled) / (len(filled) * max(filled)) if filled else 0.0


def _best_fit(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    # `rooms` has bit r set where a bin has r tokens left: the smallest room that is enough is one shift and one mask
    # away, which keeps 100,000 prompts under a second where a search through the bins would take minutes.
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms = 0
    for index in order:
        length = lengths[index]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            place = by_room[room].pop()
            if not by_room[room]:
                rooms &= ~(1 << room)
        else:
            room, place = max_tokens, len(bins)
            bins.append([])
        bins[place].append(index)
        left = room - length
        by_room.setdefault(left, []).append(place)
        rooms |= 1 << left
    return bins


def _fill(lengths: Sequence[int], order: Sequence[int], *, num_bins: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, place) for place in range(num_bins)]
    for index in order:
        filled, place = heap[0]
        bins[place].append(index)
        heapq.heapreplace(heap, (filled + lengths[index], place))
    _swap(lengths, bins)
    return bins


def _swap(lengths: Sequence[int], bins: list[list[int]]) -> None:
    """Lower the fullest bin by one swap with another bin at a time, while it stands out and a swap helps."""
    filled = [sum(lengths[index] for index in indices) for indices in bins]
    for _ in range(MOST_SWAPS):
        fullest = max(range(len(bins)), key=filled.__getitem__, default=0)
        if not bins or filled[fullest] * len(bins) <= sum(filled) * (1 + UNEVEN):
            return
        found = _best_swap(lengths, bins, filled, fullest)
        if found is None:
            return
        own, place, other = found
        difference = lengths[bins[fullest][own]] - lengths[bins[place][other]]
        bins[fullest][own], bins[place][other] = bins[place][other], bins[fullest][own]
        filled[fullest] -= difference
        filled[place] += difference


def _best_swap(
    lengths: Sequence[int], bins: list[list[int]], filled: list[int], fullest: int
) -> tuple[int, int, int] | None:
    """Return (item of the fullest bin, other bin, item of it) whose swap leaves the fuller of both lowest, if any does."""
    emptiest = heapq.nsmallest(NEAREST, range(len(bins)), key=filled.__getitem__)
    lowest, best = filled[fullest], None
    for own, index in enumerate(bins[fullest]):
        for place in emptiest:
            for other, candidate in enumerate(bins[place]):
                difference = lengths[index] - lengths[candidate]
                fuller = max(filled[fullest] - difference, filled[place] + difference)
                if fuller < lowest:
                    lowest, best = fuller, (own, place, other)
    return best
