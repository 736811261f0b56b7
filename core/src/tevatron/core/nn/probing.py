"""Scoring lists of token ids with a loaded model, and proving a checkpoint's contract with it.

The same object scores before an export, after reloading it, and in the scorer. It owns the packing of prompts into
rows by token budget; it knows nothing of text, HTTP or files.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from tevatron.core.contracts.checkpoint import CheckpointContract, Dtype, check_scores
from tevatron.core.nn.forward import LastHidden, ScoreHead, score_packed
from tevatron.core.nn.sending import Coming
from tevatron.core.packing import pack

MAX_TOKENS = 8192
"""Default token budget of one packed row."""


class PromptScorer:
    """Scores prompts with one model and head, in packed rows of at most `max_tokens`; from any number of threads."""

    def __init__(
        self,
        model: PreTrainedModel,
        head: ScoreHead,
        *,
        max_tokens: int = MAX_TOKENS,
        autocast: torch.dtype | None = None,
        run: LastHidden | None = None,
    ) -> None:
        self._model = model
        self._head = head
        self._max_tokens = max_tokens
        self._autocast = autocast
        self._run = run
        self._giving = threading.Lock()

    def score(self, prompts: Sequence[Sequence[int]]) -> list[float]:
        """Return one score a prompt, in the order given; the model is left in the mode in which it was."""
        scores = [0.0] * len(prompts)
        rows = pack([len(prompt) for prompt in prompts], max_tokens=self._max_tokens)
        for chosen, scores_P in zip(rows, self._given(prompts, rows), strict=True):
            for index, score in zip(chosen, scores_P.wait().tolist(), strict=True):
                scores[index] = score
        return scores

    def _given(
        self, prompts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]
    ) -> list[Coming]:
        """Return each row's scores, which a GPU may still be at: it has the next row when it is through with one.

        One thread gives all its rows before another one gives any, so that the first has its scores first.
        """
        with self._giving:
            was_training = self._model.training
            self._model.train(False)
            try:
                return [self._score_row([prompts[index] for index in chosen]) for chosen in rows]
            finally:
                self._model.train(was_training)

    def _score_row(self, prompts: Sequence[Sequence[int]]) -> Coming:
        device = self._model.device.type
        with (
            torch.no_grad(),
            torch.autocast(device, dtype=self._autocast, enabled=self._autocast is not None),
        ):
            return Coming(score_packed(self._model, prompts, self._head, run=self._run))


def prove(scorer: PromptScorer, contract: CheckpointContract, *, dtype: Dtype) -> float:
    """Score the contract's probes; return the largest difference, or raise `ContractError` with the numbers."""
    scores = scorer.score([probe.token_ids for probe in contract.probes])
    return check_scores(contract, scores, dtype=dtype)
