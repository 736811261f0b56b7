"""The Hugging Face engine: the forward pass of training itself, packed, last token and two rows only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers

from tevatron.core.contracts.checkpoint import Dtype
from tevatron.core.errors import ConfigError
from tevatron.core.nn.loading import load_model, score_head
from tevatron.core.nn.probing import PromptScorer
from tevatron.scorer.engines.base import EngineInfo, EngineOptions


class HfEngine:
    """Loads a model folder with transformers and scores with `core.nn`."""

    def __init__(self, options: EngineOptions) -> None:
        device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"device '{device}' is asked for, but torch finds no GPU")
        dtype: Dtype = options.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
        ids = options.answer_ids
        head = score_head(options.head, yes=ids.yes if ids else None, no=ids.no if ids else None)
        model = load_model(options.model, options.head, dtype=dtype, device=device)
        self._scorer = PromptScorer(model, head, max_tokens=options.max_batch_tokens)
        self._info = EngineInfo(
            dtype=dtype,
            device=device,
            versions={"torch": str(torch.__version__), "transformers": transformers.__version__},
        )

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return one score a prompt, in the order given."""
        return self._scorer.score(token_ids)

    def info(self) -> EngineInfo:
        """Describe the engine."""
        return self._info
