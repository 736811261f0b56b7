"""How tokens that came from several ranks are put in the order of their experts: one gather.

Megatron's own way makes a tensor of every expert's part of every rank and joins them again, hundreds of calls a layer
that a GPU waits for; its fused way compiles a kernel for every number of tokens, and no two packed passes have as many.

Shapes: T tokens, C chunks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from torch import Tensor


def use_one_gather() -> None:
    """Have Megatron's dispatcher sort with `sort_chunks` wherever its fused kernel is not asked for."""
    token_dispatcher.sort_chunks_by_idxs = _sort


def _sort(
    tokens: Tensor,
    split_sizes: Tensor,
    sorted_idxs: Tensor,
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    if fused:
        found: tuple[Tensor, Tensor | None] = sort_chunks_by_idxs(
            tokens, split_sizes, sorted_idxs, probs=probs, fused=True
        )
        return found
    return sort_chunks(tokens, split_sizes, sorted_idxs, probs)


def sort_chunks(
    tokens: Tensor, sizes_C: Tensor, order_C: Tensor, probs: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the chunks of the first dimension in another order, and those of `probs` alike.

    Args:
        tokens: [T, ...].
        sizes_C: How long each chunk is; T in all.
        order_C: Which chunk comes at each place.
        probs: [T] or [T, ...].
    """
    if torch.equal(order_C, torch.arange(len(order_C), device=order_C.device)):
        return tokens, probs
    places = _places(sizes_C, order_C, device=tokens.device, total=len(tokens))
    return _move(tokens, *places), None if probs is None else _move(probs, *places)


def _places(
    sizes_C: Tensor, order_C: Tensor, *, device: torch.device, total: int
) -> tuple[Tensor, Tensor]:
    """Return where each token of the result comes from, and where each token goes to, [T] each."""
    sizes_C = sizes_C.to(device, torch.int64, non_blocking=True)
    order_C = order_C.to(device, torch.int64, non_blocking=True)
    taken_C = sizes_C[order_C]
    shift_C = (sizes_C.cumsum(0) - sizes_C)[order_C] - (taken_C.cumsum(0) - taken_C)
    own_T = torch.arange(total, device=device)
    source_T = own_T + torch.repeat_interleave(shift_C, taken_C, output_size=total)
    target_T = torch.empty_like(source_T).scatter_(0, source_T, own_T)
    return source_T, target_T


def _move(tokens: Tensor, source_T: Tensor, target_T: Tensor) -> Tensor:
    moved: Tensor = _Move.apply(tokens, source_T, target_T)  # type: ignore[no-untyped-call]
    return moved


class _Move(torch.autograd.Function):
    """A permutation, whose gradient is gathered too: index_select's own is added up, as if places could repeat."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, source_T: Tensor, target_T: Tensor) -> Tensor:
        ctx.save_for_backward(target_T)
        return tokens.index_select(0, source_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (target_T,) = ctx.saved_tensors
        return grads[0].index_select(0, target_T), None, None
