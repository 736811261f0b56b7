"""Packing by token budget: which prompts share a forward pass. Knows lengths, not tensors."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], *, max_tokens: int) -> list[list[int]]:
    """Place items into bins of at most `max_tokens`, first-fit decreasing; return their indices by bin.

    An item longer than the budget gets a bin of its own. Every index appears exactly once; equal input gives
    equal output.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        for place, left in enumerate(room):
            if lengths[index] <= left:
                bins[place].append(index)
                room[place] -= lengths[index]
                break
        else:
            bins.append([index])
            room.append(max_tokens - lengths[index])
    return bins
