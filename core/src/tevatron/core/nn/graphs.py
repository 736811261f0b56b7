"""Replays a model's packed passes as CUDA graphs: one launch in place of one for each of their kernels.

Launching a small model's pass takes a process as long as the pass takes the GPU, and longer where other threads want
the interpreter. A graph has fixed shapes: passes are rounded up to one of few, and a shape that comes a second time is
captured. Where that fails, its passes are launched as they were: it takes longer, and gives the same. This file owns the
shapes, the buffers and the capturing; it knows nothing of heads or of who asks.

Shapes: P prompts, T tokens of a packed row, H hidden size.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tevatron.core.nn.attention import FLASH_DTYPES, Segments
from tevatron.core.nn.forward import last_hidden

logger = logging.getLogger(__name__)

_MOST = 64
"""Shapes that are captured; each takes some megabytes."""


class Graphs:
    """Stands for `last_hidden` of one model on a GPU; called by one thread at a time, on one stream."""

    def __init__(self, model: PreTrainedModel, *, max_tokens: int) -> None:
        """Keep the model; passes of at most `max_tokens` are not rounded up beyond that."""
        self._model = model
        self._max_tokens = max_tokens
        self._passes: dict[Shape, _Pass] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._may_capture = True

    def __call__(self, *, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> Tensor:
        """Return the last tokens' hidden states, [P, H]; they are overwritten by the next pass."""
        shape = Shape.of(segments, max_tokens=self._max_tokens)
        if shape not in self._passes:
            if len(self._passes) == _MOST or not self._may_capture:
                return last_hidden(
                    self._model, input_ids=input_ids, position_ids=position_ids, segments=segments
                )
            self._passes[shape] = _Pass(self._model, shape)
        same = self._passes[shape]
        same.fill(input_ids, position_ids, segments)
        if same.captured is None:
            # Before a capture too: it makes what a capture must not, such as this thread's handle of cuBLAS.
            hidden_PH = same.launch()
            if same.has_run and self._may_capture:
                self._capture(same)
            same.has_run = True
        else:
            graph, hidden_PH = same.captured
            graph.replay()
        return hidden_PH[: len(segments.lengths)]

    def _capture(self, same: _Pass) -> None:
        graph, device = torch.cuda.CUDAGraph(), self._model.device
        try:
            # A capture that fails leaves its own stream behind as the current one. Other threads wait for their
            # scores meanwhile, which a capture of all threads would not let them.
            with (
                torch.cuda.device(device),
                torch.cuda.stream(torch.cuda.current_stream(device)),
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                hidden_PH = same.launch()
        except RuntimeError as error:
            logger.warning("no more passes are captured, for it failed: %s", error, exc_info=error)
            self._may_capture = False
        else:
            same.captured = graph, hidden_PH


class Shape(NamedTuple):
    """What a pass is rounded up to."""

    num_tokens: int
    num_prompts: int
    longest: int

    @classmethod
    def of(cls, segments: Segments, *, max_tokens: int) -> Shape:
        """Return the shape of these prompts: an eighth more tokens at most, up to twice the prompts and the length.

        Prompts without tokens and tokens that are not there take the attention kernel hardly any time.
        """
        num_tokens = sum(segments.lengths)
        step = max(32, _power(num_tokens) // 16)
        rounded = -(-num_tokens // step) * step
        if num_tokens <= max_tokens:
            rounded = min(rounded, max_tokens)
        return cls(rounded, _power(len(segments.lengths)), max(128, _power(segments.longest)))


def _power(number: int) -> int:
    """Return the power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


class _Pass:
    """The passes of one shape."""

    def __init__(self, model: PreTrainedModel, shape: Shape) -> None:
        self._model = model
        self._input_ids = torch.zeros(1, shape.num_tokens, dtype=torch.int64, device=model.device)
        self._position_ids = torch.zeros_like(self._input_ids)
        ends = torch.zeros(shape.num_prompts + 1, dtype=torch.int32, device=model.device)
        self._segments = Segments((shape.longest,), ends)
        self.has_run = False
        self.captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        """What is replayed, and where it leaves the hidden states."""

    def fill(self, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> None:
        """Put a pass into the buffers; behind it is what was there before, which nobody attends to."""
        num_tokens = input_ids.shape[1]
        self._input_ids[:, :num_tokens].copy_(input_ids)
        self._position_ids[:, :num_tokens].copy_(position_ids)
        ends, filled = self._segments.cu_seq_lens, segments.cu_seq_lens
        ends[: len(filled)].copy_(filled)
        ends[len(filled) :].fill_(num_tokens)

    def launch(self) -> Tensor:
        """Run what the buffers hold; returns the hidden states of as many prompts as the shape has."""
        return last_hidden(
            self._model,
            input_ids=self._input_ids,
            position_ids=self._position_ids,
            segments=self._segments,
        )


def is_capturable(model: PreTrainedModel) -> bool:
    """Tell whether the model's passes are launched without waiting for the GPU; others cannot be captured."""
    if model.device.type != "cuda" or model.dtype not in FLASH_DTYPES:
        return False
    device = model.device
    segments = Segments.of((3, 5), device)
    ids = torch.zeros(1, 8, dtype=torch.int64, device=device)
    positions = torch.tensor([[*range(3), *range(5)]], device=device)
    mode = torch.cuda.get_sync_debug_mode()
    with torch.no_grad():
        # What is made once may wait.
        last_hidden(model, input_ids=ids, position_ids=positions, segments=segments)
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            last_hidden(model, input_ids=ids, position_ids=positions, segments=segments)
        except RuntimeError as error:
            logger.info("passes are launched kernel by kernel: %s", error)
            return False
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    return True
