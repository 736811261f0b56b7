"""How tokens are put in the order of their experts and back: gathers alone, forward and backward.

Megatron's own way makes a tensor of every expert's part of every rank and joins them again, hundreds of calls a layer
that a GPU waits for, and adds a token's copies up with atomic writes; its fused way compiles a kernel for every number
of tokens, and no two packed passes have as many.

Shapes: T tokens, K copies of each (as many as it has experts), H hidden size, C chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute
from torch import Tensor


def use_gathers() -> None:
    """Have Megatron's dispatcher move tokens with the functions below wherever its fused kernels are not asked for."""
    token_dispatcher.permute = _permute
    token_dispatcher.unpermute = _unpermute
    token_dispatcher.sort_chunks_by_idxs = _sort


def _permute(
    tokens_TH: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[Any, ...]:
    if fused or drop_and_pad:
        whole: tuple[Any, ...] = permute(
            tokens_TH, routing_map, probs, num_out_tokens, fused, drop_and_pad
        )
        return whole
    # The order is Megatron's; only the tokens are moved here.
    _, probs, token_of_copy, *rest = permute(
        tokens_TH.new_empty(len(tokens_TH), 0), routing_map, probs, num_out_tokens
    )
    return copy_tokens(tokens_TH, token_of_copy), probs, token_of_copy, *rest


def _unpermute(
    copies: Tensor,
    token_of_copy: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> Tensor:
    # The dispatcher gives no probabilities: the experts have multiplied with them.
    if fused or drop_and_pad or probs is not None:
        found: Tensor = unpermute(
            copies, token_of_copy, restore_shape, probs, routing_map, fused, drop_and_pad
        )
        return found
    return sum_copies(copies, token_of_copy, restore_shape[0])


def copy_tokens(tokens_TH: Tensor, token_of_copy: Tensor) -> Tensor:
    """Return the copies of the tokens, [T * K, H], of which each token has as many as every other."""
    copies: Tensor = _Copy.apply(tokens_TH, token_of_copy)  # type: ignore[no-untyped-call]
    return copies


def sum_copies(copies: Tensor, token_of_copy: Tensor, num_tokens: int) -> Tensor:
    """Return the sum of each token's copies, [T, H]."""
    tokens_TH: Tensor = _Sum.apply(copies, token_of_copy, num_tokens)  # type: ignore[no-untyped-call]
    return tokens_TH


def _sum(copies: Tensor, token_of_copy: Tensor, num_tokens: int) -> Tensor:
    places_TK = token_of_copy.argsort(stable=True).view(num_tokens, -1)
    return F.embedding_bag(places_TK, copies, mode="sum")


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens_TH: Tensor, token_of_copy: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_copy)
        ctx.num_tokens = len(tokens_TH)
        return tokens_TH.index_select(0, token_of_copy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (token_of_copy,) = ctx.saved_tensors
        return _sum(grads[0].contiguous(), token_of_copy, ctx.num_tokens), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, token_of_copy: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(token_of_copy)
        return _sum(copies, token_of_copy, num_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None


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
