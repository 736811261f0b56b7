"""Layers of a model where Transformer Engine is not installed: attention and norm on torch's own kernels.

Megatron's own local attention refuses packed rows and builds the full score matrix; its local norm refuses sequence
parallelism. Both are replaced here; every other layer stays Megatron's. With Transformer Engine none of this is used.

Shapes: T tokens of a packed row, S length, B rows, N heads of this rank, K key heads of this rank, D head size.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from tevatron.core.errors import ConfigError
from tevatron.trainer.program.backends.megatron.grouped import grouped_experts
from tevatron.trainer.program.backends.megatron.passes import Cut, own_tokens


def torch_block_spec(provider: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return this pipeline stage's layers: Megatron's local ones, with our attention and norms in them."""
    spec = get_gpt_layer_local_spec(
        num_experts=provider.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=provider.qk_layernorm,
        normalization=provider.normalization,
    )
    layer = spec.submodules
    attention = layer.self_attention.submodules
    attention.core_attention = TorchAttention
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    if provider.num_moe_experts and provider.moe_grouped_gemm:
        layer.mlp = grouped_experts(layer.mlp)
    if provider.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    num_layers = get_num_layers_to_build(provider, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=RMSNorm)


class RMSNorm(nn.Module):
    """Root mean square norm whose weight takes part in sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float, **_: object) -> None:
        super().__init__()
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ConfigError(
                "a model with LayerNorm or zero-centred norms needs Transformer Engine, which is not installed"
            )
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums the gradient of such a weight over the tensor-parallel ranks.
        vars(self.weight)["sequence_parallel"] = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize over the last dimension, in fp32."""
        normed = F.rms_norm(hidden.float(), (hidden.shape[-1],), eps=self.eps)
        return normed.type_as(hidden) * self.weight


class TorchAttention(nn.Module):
    """Causal attention, within each prompt of a packed row or within each padded row."""

    def __init__(
        self, config: Any, layer_number: int, softmax_scale: float | None = None, **_: object
    ) -> None:
        super().__init__()
        self._scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self._dropout = config.attention_dropout
        windowed = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        # Megatron's window counts the keys before a query, without the query itself.
        self._window: int | None = config.window_size[0] + 1 if windowed else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> Tensor:
        """Attend; packed tensors are [T, N, D], padded ones [S, B, N, D]. Returns [T, N, D] or [S, B, N * D]."""
        if packed_seq_params is None:
            heads = self._attend(*(one.permute(1, 2, 0, 3) for one in (query, key, value)))
            return heads.permute(2, 0, 1, 3).flatten(2)
        starts = packed_seq_params.cu_seqlens_q
        group = parallel_state.get_context_parallel_group()
        if group.size() == 1:
            return self._attend_packed(query, key, value, starts)
        # Every rank computes all of it and keeps its part: right, and of use to nobody but tests. A GPU has
        # Transformer Engine, which sends keys and values from rank to rank.
        places = [own_tokens(starts, Cut(rank, group.size())) for rank in range(group.size())]
        order = torch.cat(places).argsort().to(query.device)
        query, key, value = (
            gather_from_sequence_parallel_region(one, group=group).index_select(0, order)
            for one in (query, key, value)
        )
        found = self._attend_packed(query, key, value, starts)
        return found.index_select(0, places[group.rank()].to(query.device))

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, starts: Tensor) -> Tensor:
        # On the CPU, where this runs in tests, the list costs nothing; a GPU has Transformer Engine.
        lengths = starts.diff().tolist()
        parts = [
            self._attend(*(one.transpose(0, 1).unsqueeze(0) for one in qkv))
            for qkv in zip(*(torch.split(one, lengths) for one in (query, key, value)), strict=True)
        ]
        return torch.cat(parts, dim=2)[0].transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally; query is [B, N, S, D], key and value are [B, K, S, D]."""
        length = query.shape[2]
        mask = None
        if self._window is not None and self._window < length:
            full = torch.ones(length, length, dtype=torch.bool, device=query.device)
            mask = full.tril().triu(diagonal=1 - self._window)
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
