"""One forward pass's input: whole groups laid into one packed row, or padded side by side.

Owns the tensors that Megatron's model takes. It knows neither the model nor the loss.

With context parallelism each rank holds a part of every prompt: two of its pieces, one from each half, so that all
ranks have alike much to attend to. That is how Megatron's rotary embedding and Transformer Engine expect it.

Shapes: T tokens of a packed row (of this rank), B rows, S width of padded rows, P prompts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.nn.sending import sent
from tevatron.core.packing import pack
from tevatron.trainer.program.data.groups import Group

TOKENS_MULTIPLE = 16
"""Packed rows are as long as a multiple of this, which the kernels of Transformer Engine want."""


class LastTokens(NamedTuple):
    """Where the prompts' last tokens are."""

    rows: Tensor
    """int64 [P]: places in the hidden states [S, B, H], laid end to end."""
    is_own: Tensor | None
    """bool [P]: whether the token is on this rank; None where every rank has all tokens."""


class Cut(NamedTuple):
    """This rank among those that share the tokens of a packed row."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward pass takes."""

    groups: list[Group]
    """Empty where a rank only keeps the others company."""
    input_ids: Tensor
    """int64 [1, T] or [B, S]"""
    position_ids: Tensor
    last: LastTokens
    packing: PackedSeqParams | None
    is_padding: Tensor
    """bool, as input_ids: tokens that belong to no prompt, which the routers leave out of their losses."""


def choose_passes(groups: Sequence[Group], arguments: TrainArguments) -> list[list[Group]]:
    """Divide a rank's groups of a step: by token budget, or by micro batches where packing is off."""
    if arguments.packing:
        lengths = [sum(len(prompt) for prompt in group.prompts) for group in groups]
        bins = pack(lengths, max_tokens=arguments.packing_max_tokens)
        return [[groups[index] for index in indices] for indices in bins]
    size = arguments.per_device_train_batch_size
    return [list(groups[start : start + size]) for start in range(0, len(groups), size)]


def make_pass(
    groups: list[Group],
    *,
    packed: bool,
    pad_to_multiple_of: int,
    num_shards: int,
    cut: Cut,
    device: torch.device,
) -> Pass:
    """Make the tensors; `num_shards` ranks share the tokens with sequence parallelism, `cut.size` the context."""
    prompts = [prompt for group in groups for prompt in group.prompts] or [[0]]
    if packed:
        multiple = math.lcm(TOKENS_MULTIPLE, num_shards)
        return _packed(groups, prompts, multiple=multiple, cut=cut, device=device)
    assert cut.size == 1, "check_arguments refuses padded rows with context parallelism"
    multiple = math.lcm(pad_to_multiple_of, num_shards)
    return _padded(groups, prompts, multiple=multiple, device=device)


def _packed(
    groups: list[Group],
    prompts: list[list[int]],
    *,
    multiple: int,
    cut: Cut,
    device: torch.device,
) -> Pass:
    # Each prompt is as long as a multiple of the pieces; the padding after its last token is seen by none before it.
    pieces = 2 * cut.size if cut.size > 1 else 1
    lengths = [len(prompt) for prompt in prompts]
    widths = [-(-length // pieces) * pieces for length in lengths]
    # What fills the row up is a prompt of its own, which nothing looks at.
    filling = -sum(widths) % (cut.size * multiple)
    if filling:
        lengths.append(0)
        widths.append(filling)
    lengths_P, widths_P = torch.tensor(lengths), torch.tensor(widths)
    starts = F.pad(widths_P.cumsum(0), (1, 0))
    prompt_T = torch.arange(len(widths)).repeat_interleave(widths_P)
    place_T = torch.arange(len(prompt_T)) - starts[prompt_T]
    is_padding_T = place_T >= lengths_P[prompt_T]
    tokens = torch.tensor([token for prompt in prompts for token in prompt])
    ids_T = torch.zeros_like(prompt_T).masked_scatter_(~is_padding_T, tokens)
    last_P = (starts[:-1] + lengths_P - 1)[: len(prompts)]
    own_T = own_tokens(starts, cut)
    bounds = sent(starts.to(torch.int32), device)
    return Pass(
        groups=groups,
        input_ids=sent(ids_T[own_T].unsqueeze(0), device),
        position_ids=sent(place_T[own_T].unsqueeze(0), device),
        last=_last_tokens(last_P, own_T, cut, device),
        packing=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(widths),
            max_seqlen_kv=max(widths),
        ),
        is_padding=sent(is_padding_T[own_T].unsqueeze(0), device),
    )


def own_tokens(starts: Tensor, cut: Cut) -> Tensor:
    """Return the places in the whole row of the tokens that the rank holds, in order.

    starts: int64 [number of prompts + 1], where each begins, and the whole length.
    """
    if cut.size == 1:
        return torch.arange(int(starts[-1]))
    parts = []
    for start, end in itertools.pairwise(starts.tolist()):
        piece = (end - start) // (2 * cut.size)
        for number in (cut.rank, 2 * cut.size - 1 - cut.rank):
            parts.append(torch.arange(start + number * piece, start + (number + 1) * piece))
    return torch.cat(parts)


def _last_tokens(last_P: Tensor, own_T: Tensor, cut: Cut, device: torch.device) -> LastTokens:
    if cut.size == 1:
        return LastTokens(sent(last_P, device), None)
    place_P = torch.searchsorted(own_T, last_P).clamp(max=len(own_T) - 1)
    is_own = own_T[place_P] == last_P
    return LastTokens(sent(place_P, device), sent(is_own, device))


def _padded(
    groups: list[Group], prompts: list[list[int]], *, multiple: int, device: torch.device
) -> Pass:
    lengths_P = torch.tensor([len(prompt) for prompt in prompts])
    width = -(-int(lengths_P.max()) // multiple) * multiple
    rows = [[*prompt, *([0] * (width - len(prompt)))] for prompt in prompts]
    place_S = torch.arange(width)
    num_rows = len(rows)
    last_P = (lengths_P - 1) * num_rows + torch.arange(num_rows)
    return Pass(
        groups=groups,
        input_ids=sent(torch.tensor(rows), device),
        position_ids=sent(place_S.expand(num_rows, -1), device),
        last=LastTokens(sent(last_P, device), None),
        packing=None,
        is_padding=sent(place_S >= lengths_P.unsqueeze(1), device),
    )
