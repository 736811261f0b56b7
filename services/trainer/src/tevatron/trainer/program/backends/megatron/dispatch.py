"""How tokens get to their experts and back: every rank gathers all ranks' tokens, and its sums go back where they came from.

Megatron's own way sends a token once for each of its experts, and sorts what a rank gets, in pieces of an expert and a
rank. Here a token travels once; its rank copies it for the experts that it has, already in their order, adds up what
they made of it, and the ranks' sums are added on their way home.

Shapes: T tokens of this rank, A gathered tokens of all ranks, each rank's filled up to the longest's, C copies (a token
has one for each of its experts on this rank), E experts, L of them on this rank, H hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor, nn


def gather_tokens(chunk: nn.Module) -> None:
    """Have the mixtures of a model dispatch their tokens as described above."""
    for layer in chunk.modules():
        if isinstance(layer, MoELayer):
            layer.token_dispatcher = GatheringDispatcher(layer)


class Order(NamedTuple):
    """Where the copies of tokens are: by expert, and within an expert by token."""

    tokens: Tensor
    """int64 [C]: the token of each copy."""
    places: Tensor
    """int64 [C]: where the copies of the first token are, then those of the second, ..."""
    starts: Tensor
    """int64 [A]: where each token's copies begin in `places`."""

    @classmethod
    def of(cls, token_C: Tensor, num_copies_A: Tensor) -> Order:
        """Return the order of copies of which each token has so many."""
        # Fewer bits are sorted faster.
        place_C = token_C.to(torch.int32).argsort(stable=True)
        return cls(token_C, place_C, num_copies_A.cumsum(0) - num_copies_A)


class GatheringDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """A layer's dispatcher; it keeps what a pass's way to the experts told of the way back."""

    def __init__(self, layer: MoELayer) -> None:
        super().__init__(layer.config, get_default_pg_collection())
        experts = layer.local_expert_indices
        self._local = slice(experts[0], experts[-1] + 1)
        self._shape: torch.Size | None = None
        self._routed: Tensor | None = None
        self._sizes_L: list[int] = []
        self._order: Order | None = None

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's input [..., H], which experts each token goes to [T, E], and with which weight [T, E]."""
        self._shape = hidden_states.shape
        self._routed = routing_map
        return hidden_states.view(-1, self._shape[-1]), probs

    def token_dispatch(self, tokens_TH: Tensor, probs_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens of all ranks [A, H], and their weights [A, E]."""
        assert self._routed is not None
        width = self._exchange_sizes(self._routed)
        self._routed = self._gathered(self._routed.to(torch.uint8), width).bool()
        return self._gathered(tokens_TH, width), self._gathered(probs_TE, width)

    def _exchange_sizes(self, routed_TE: Tensor) -> int:
        """Learn how many copies each expert of this rank gets; returns the tokens of the rank that has most."""
        sizes = F.pad(routed_TE.sum(0), (0, 1), value=len(routed_TE))
        ranks = sizes.new_empty(self.ep_size * len(sizes))
        dist.all_gather_into_tensor(ranks, sizes, group=self.ep_group)
        # The one wait for a GPU in a layer: the shapes of all that follows depend on it.
        ranks = ranks.view(self.ep_size, -1).cpu()
        self._sizes_L = ranks[:, self._local].sum(0).tolist()
        return int(ranks[:, -1].max())

    def _gathered(self, own: Tensor, width: int) -> Tensor:
        if self.ep_size == 1:
            return own
        # What fills a rank's tokens up goes to no expert.
        filled = F.pad(own, (0, 0, 0, width - len(own)))
        gathered: Tensor = gather_from_sequence_parallel_region(filled, group=self.ep_group)
        return gathered

    def dispatch_postprocess(
        self, tokens_AH: Tensor, probs_AE: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the copies for this rank's experts [C, H], how many each gets [L], and the copies' weights [C]."""
        assert self._routed is not None
        routed_AL = self._routed[:, self._local]
        self._routed = None
        num_copies = sum(self._sizes_L)
        expert_C, token_C = torch.nonzero_static(routed_AL.t(), size=num_copies).unbind(1)
        self._order = Order.of(token_C, routed_AL.sum(1))
        probs_AL = probs_AE[:, self._local]
        probs_C = probs_AL.reshape(-1).gather(0, token_C * probs_AL.shape[1] + expert_C)
        return copy_tokens(tokens_AH, self._order), torch.tensor(self._sizes_L), probs_C

    def combine_preprocess(self, copies_CH: Tensor) -> Tensor:
        """Return the sums of the tokens' copies, [A, H]."""
        assert self._order is not None
        order, self._order = self._order, None
        return sum_copies(copies_CH, order)

    def token_combine(self, sums_AH: Tensor) -> Tensor:
        """Return the sums over all ranks of this rank's own tokens, [T or more, H]."""
        own: Tensor = reduce_scatter_to_sequence_parallel_region(sums_AH, group=self.ep_group)
        return own

    def combine_postprocess(self, sums: Tensor) -> Tensor:
        """Return the layer's output, in the shape of its input."""
        assert self._shape is not None
        return sums[: self._shape[:-1].numel()].view(self._shape)


def copy_tokens(tokens_AH: Tensor, order: Order) -> Tensor:
    """Return the tokens' copies in their order, [C, H]."""
    copies_CH: Tensor = _Copy.apply(tokens_AH, *order)  # type: ignore[no-untyped-call]
    return copies_CH


def sum_copies(copies_CH: Tensor, order: Order) -> Tensor:
    """Return the sum of each token's copies, [A, H]; 0 where it has none."""
    sums_AH: Tensor = _Sum.apply(copies_CH, *order)  # type: ignore[no-untyped-call]
    return sums_AH


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_AH: Tensor, token_C: Tensor, place_C: Tensor, start_A: Tensor
    ) -> Tensor:
        ctx.save_for_backward(place_C, start_A)
        return tokens_AH.index_select(0, token_C)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum(grads[0].contiguous(), *ctx.saved_tensors), None, None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, copies_CH: Tensor, token_C: Tensor, place_C: Tensor, start_A: Tensor
    ) -> Tensor:
        ctx.save_for_backward(token_C)
        return _sum(copies_CH, place_C, start_A)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return grads[0].index_select(0, *ctx.saved_tensors), None, None, None


def _sum(copies_CH: Tensor, place_C: Tensor, start_A: Tensor) -> Tensor:
    if copies_CH.is_cuda:
        from tevatron.trainer.program.backends.megatron.rows import sum_rows

        return sum_rows(copies_CH, place_C, start_A)
    return F.embedding_bag(place_C, copies_CH, start_A, mode="sum")
