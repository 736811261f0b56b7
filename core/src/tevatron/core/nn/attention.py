"""Attention over packed rows: several prompts in one row, none of which sees another.

Registers one function with transformers under `ATTENTION`. It owns which kernel runs and refuses what that kernel
would silently leave out. It knows nothing of heads, scores or training.

Shapes: T tokens of a packed row, H heads, K key heads, D head size, B rows, S length of a padded row.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from tevatron.core.nn.sending import sent

ATTENTION = "tevatron_packed"
"""Name under which the function is registered; no mask is made for it, since none is registered beside it."""

REFUSED = ("softcap", "s_aux", "position_bias")
"""Arguments of some models' attention that change the scores and that these kernels do not compute."""

_windows: ContextVar[list[int | None] | None] = ContextVar(
    "tevatron_attention_windows", default=None
)

# torch 2.11, which the Megatron environment has, takes fewer key heads without being told.
_ENABLE_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
FLASH_DTYPES = (torch.float16, torch.bfloat16)
"""Of the kernel that reads where prompts end on the GPU; others are told by the process."""


# Not frozen, though nobody changes it: torch 2.11 looks into frozen dataclasses that pass compiled code, and would compile
# anew for each number of prompts.
@dataclass(slots=True)
class Segments:
    """Where the prompts of a packed row begin and end."""

    lengths: tuple[int, ...]
    cu_seq_lens: Tensor
    """int32 of shape [len(lengths) + 1], on the row's device: 0, then the running sum."""

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.lengths)

    @classmethod
    def of(cls, lengths: tuple[int, ...], device: torch.device) -> Segments:
        """Return the segments of prompts of these lengths."""
        sums = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(lengths=lengths, cu_seq_lens=sent(sums, device))


def packed_attention(  # noqa: PLR0913  the signature is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    segments: Segments | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend causally within each segment; without segments, within each row.

    query: [B, H, S, D], key and value: [B, K, S, D]; B is 1 and S is T for a packed row. Returns [B, S, H, D].
    """
    _refuse_unsupported(module, attention_mask, is_causal, query.shape[2], key.shape[2], kwargs)
    query, key, value = _same_dtype(query, key, value)
    window = sliding_window if sliding_window and sliding_window > 0 else None
    if (windows := _windows.get()) is not None:
        windows.append(window)
    if segments is None:
        return _causal(query, key, value, dropout, scaling, window).transpose(1, 2), None
    if query.is_cuda and query.dtype in FLASH_DTYPES and dropout == 0.0:
        return _flash(query, key, value, segments, scaling, window), None
    # split, not slices: the backward of a slice fills a row of zeros for every segment, that of a split is one cat.
    lengths = list(segments.lengths)
    parts = [
        _causal(q, k, v, dropout, scaling, window)
        for q, k, v in zip(
            torch.split(query, lengths, dim=2),
            torch.split(key, lengths, dim=2),
            torch.split(value, lengths, dim=2),
            strict=True,
        )
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _refuse_unsupported(
    module: nn.Module,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    num_queries: int,
    num_keys: int,
    others: dict[str, object],
) -> None:
    name = type(module).__name__
    for argument in REFUSED:
        if others.get(argument) is not None:
            raise NotImplementedError(
                f"{name} uses '{argument}', which packed attention does not compute"
            )
    if attention_mask is not None:
        raise NotImplementedError(
            f"{name} was given a mask; packed attention takes segments and no mask"
        )
    if not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise NotImplementedError(f"{name} is not causal; packed attention is")
    if num_queries != num_keys:
        raise NotImplementedError(
            f"{name}: {num_queries} queries and {num_keys} keys; a cache is not supported"
        )


def _same_dtype(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    # Under autocast the rotary embedding leaves q and k in fp32 beside a bf16 v.
    device = query.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    longest = segments.longest
    grouped: dict[str, Any] = {"enable_gqa": query.shape[1] != key.shape[1]} if _ENABLE_GQA else {}
    # The kernel's window counts the keys before a query; a model's counts the query itself too.
    sides = (window - 1, 0) if window is not None and window < longest else (-1, 0)
    out = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        segments.cu_seq_lens,
        segments.cu_seq_lens,
        longest,
        longest,
        scale=scaling,
        window_size=sides,
        **grouped,
    )
    assert isinstance(out, Tensor)
    return out.unsqueeze(0)


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    length = query.shape[2]
    mask = None
    if window is not None and window < length:
        full = torch.ones(length, length, dtype=torch.bool, device=query.device)
        mask = full.tril().triu(diagonal=1 - window)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


@contextmanager
def recorded_windows() -> Iterator[list[int | None]]:
    """Collect the window of every attention call within the block, for the check on loading."""
    windows: list[int | None] = []
    token = _windows.set(windows)
    try:
        yield windows
    finally:
        _windows.reset(token)


def register() -> None:
    """Make `ATTENTION` known to transformers; doing it again changes nothing."""
    AttentionInterface.register(ATTENTION, packed_attention)
