"""The module that DDP and FSDP wrap: prompts in, scores out, through core's one forward pass."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from tevatron.core.nn.forward import ScoreHead, score_packed, score_padded


class RerankModule(nn.Module):
    """Scores prompts of one rank, packed or padded."""

    def __init__(
        self, model: PreTrainedModel, head: ScoreHead, *, packing: bool, pad_to_multiple_of: int
    ) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.packing = packing
        self.pad_to_multiple_of = pad_to_multiple_of
        # FSDP wraps the layers that the model names.
        self._no_split_modules = list(getattr(model, "_no_split_modules", None) or [])

    def forward(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        """Return fp32 scores, one a prompt."""
        if self.packing:
            return score_packed(self.model, prompts, self.head)
        return score_padded(
            self.model, prompts, self.head, pad_to_multiple_of=self.pad_to_multiple_of
        )
