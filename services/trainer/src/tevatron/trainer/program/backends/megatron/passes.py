"""One forward pass's input: whole groups laid into one packed row, or padded side by side.

Owns the tensors that Megatron's model takes. It knows neither the model nor the loss.

Shapes: T tokens of a packed row, B rows, S width of padded rows, P prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.packing import pack
from tevatron.trainer.program.data.groups import Group

TOKENS_MULTIPLE = 16
"""Packed rows are as long as a multiple of this, which the kernels of Transformer Engine want."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What one forward pass takes."""

    groups: list[Group]
    """Empty where a rank only keeps the others company."""
    input_ids: Tensor
    """int64 [1, T] or [B, S]"""
    position_ids: Tensor
    last_rows: Tensor
    """int64 [P]: where each prompt's last token is in the hidden states [S, B, H], laid end to end."""
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
    device: torch.device,
) -> Pass:
    """Make the tensors; `num_shards` ranks share the tokens with sequence parallelism."""
    prompts = [prompt for group in groups for prompt in group.prompts] or [[0]]
    if packed:
        return _packed(
            groups, prompts, multiple=math.lcm(TOKENS_MULTIPLE, num_shards), device=device
        )
    multiple = math.lcm(pad_to_multiple_of, num_shards)
    return _padded(groups, prompts, multiple=multiple, device=device)


def _packed(
    groups: list[Group], prompts: list[list[int]], *, multiple: int, device: torch.device
) -> Pass:
    ends = torch.tensor([0, *(len(prompt) for prompt in prompts)]).cumsum(0)
    num_tokens = int(ends[-1])
    num_padding = -num_tokens % multiple
    # The padding is a prompt of its own, which nothing looks at.
    rows = prompts if num_padding == 0 else [*prompts, [0] * num_padding]
    lengths = [len(row) for row in rows]
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    is_padding = torch.zeros(1, num_tokens + num_padding, dtype=torch.bool)
    is_padding[:, num_tokens:] = True
    return Pass(
        groups=groups,
        input_ids=torch.tensor([[token for row in rows for token in row]]).to(device),
        position_ids=torch.cat([torch.arange(length) for length in lengths])
        .unsqueeze(0)
        .to(device),
        last_rows=(ends[1:] - 1).to(device),
        packing=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        ),
        is_padding=is_padding.to(device),
    )


def _padded(
    groups: list[Group], prompts: list[list[int]], *, multiple: int, device: torch.device
) -> Pass:
    lengths_P = torch.tensor([len(prompt) for prompt in prompts])
    width = -(-int(lengths_P.max()) // multiple) * multiple
    rows = [[*prompt, *([0] * (width - len(prompt)))] for prompt in prompts]
    place_S = torch.arange(width)
    num_rows = len(rows)
    return Pass(
        groups=groups,
        input_ids=torch.tensor(rows).to(device),
        position_ids=place_S.expand(num_rows, -1).to(device),
        last_rows=((lengths_P - 1) * num_rows + torch.arange(num_rows)).to(device),
        packing=None,
        is_padding=(place_S >= lengths_P.unsqueeze(1)).to(device),
    )
