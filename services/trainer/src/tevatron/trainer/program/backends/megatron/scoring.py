"""From the last pipeline stage's hidden states to scores: the last token of each prompt, two rows of the vocabulary.

The rows may lie in different shards of a vocabulary that is split over the tensor-parallel ranks. Every rank keeps its
part in the graph, also one that owns neither row, or the collectives of the backward pass would not match. So does
every context-parallel rank, also for prompts whose last token another one has. It knows nothing of losses or data.

Shapes: S tokens (of a packed row, or the width of padded rows), B rows, P prompts, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor
from transformers import PreTrainedConfig

from tevatron.core.errors import ConfigError
from tevatron.core.nn.forward import YesNoHead
from tevatron.core.nn.sending import sent
from tevatron.trainer.program.backends.megatron.passes import LastTokens

REFUSED = ("logits_scaling", "logit_scale", "lm_head_multiplier")
"""Keys of a model's config that scale its logits in a way that only its own output layer knows."""


def check_logits(config: PreTrainedConfig, *, packing: bool) -> None:
    """Raise `ConfigError` for a model whose logits are scaled or capped by something that is not computed here."""
    text = config.get_text_config()
    cap = getattr(text, "attn_logit_softcapping", None)
    if cap is not None and packing:
        raise ConfigError(
            f"model_type '{config.model_type}' caps its attention at attn_logit_softcapping={cap}, which packed rows "
            "cannot: use --no_packing, or the hf backend"
        )
    for key in REFUSED:
        value = getattr(text, key, None)
        if value not in (None, 1, 1.0):
            raise ConfigError(
                f"model_type '{config.model_type}' scales its logits by {key}={value}, which is not supported"
            )


@dataclass(frozen=True, slots=True)
class AnswerScores:
    """`GPTModel.forward`'s output processor: returns fp32 scores of shape [P], the same on every tensor-parallel rank."""

    head: YesNoHead
    softcap: float | None
    """`final_logit_softcapping` of the model."""

    def __call__(
        self,
        *,
        hidden_states: Tensor,
        output_layer: Any,
        output_weight: Tensor | None,
        context: LastTokens,
        config: Any,
        **_: object,
    ) -> Tensor:
        """Score; hidden_states is [S, B, H] (S over the tensor ranks with sequence parallelism).

        context: where each prompt's last token is in the rows laid end to end, s * B + b.
        """
        if config.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True
            )
            hidden_PH = hidden_SBH.flatten(0, 1).index_select(0, context.rows)
        else:
            hidden_PH = hidden_states.flatten(0, 1).index_select(0, context.rows)
            hidden_PH = copy_to_tensor_model_parallel_region(hidden_PH)
        weight = output_layer.weight if output_weight is None else output_weight
        bias = getattr(output_layer, "bias", None)
        own_P2 = self._own_logits(hidden_PH.float(), weight, bias)
        logits_P2: Tensor = reduce_from_tensor_model_parallel_region(own_P2)
        if context.is_own is not None:
            # One of the ranks that share a prompt has its last token; its logits are for all of them.
            logits_P2 = reduce_from_tensor_model_parallel_region(
                logits_P2 * context.is_own.unsqueeze(1),
                group=parallel_state.get_context_parallel_group(),
            )
        if self.softcap is not None:
            logits_P2 = torch.tanh(logits_P2 / self.softcap) * self.softcap
        return logits_P2[:, 0] - logits_P2[:, 1]

    def _own_logits(self, hidden_PH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
        """Return this rank's part of the two logits: zero, but in the graph, for a row of another rank."""
        num_rows = weight_VH.shape[0]
        first = parallel_state.get_tensor_model_parallel_rank() * num_rows
        rows = [self.head.yes - first, self.head.no - first]
        is_own = [0 <= row < num_rows for row in rows]
        kept = torch.tensor([row if own else 0 for row, own in zip(rows, is_own, strict=True)])
        index = sent(kept, hidden_PH.device)
        own_2 = sent(torch.tensor(is_own, dtype=torch.float32), hidden_PH.device)
        logits_P2 = hidden_PH @ weight_VH.index_select(0, index).float().t()
        if bias_V is not None:
            logits_P2 = logits_P2 + bias_V.index_select(0, index).float()
        return logits_P2 * own_2
