"""The one forward pass and the one score: `logit(yes) - logit(no)` at the last token of a prompt.

Owns how token ids become scores, packed or padded, for training, probing and serving alike. Only the last token of
each prompt is projected, and only on two rows of the vocabulary. It knows nothing of text, losses or batching policy.

Shapes: P prompts, T tokens of a packed row, S length of a padded row, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tevatron.core.errors import ConfigError
from tevatron.core.nn.attention import Segments
from tevatron.core.nn.sending import sent


@dataclass(frozen=True, slots=True)
class YesNoHead:
    """Score with the language-model head: the ids of the two answers."""

    yes: int
    no: int


@dataclass(frozen=True, slots=True)
class SeqClsHead:
    """Score with the one row of the `score` module."""


ScoreHead = YesNoHead | SeqClsHead


class LastHidden(Protocol):
    """`last_hidden` of one model, run in another way."""

    def __call__(self, *, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> Tensor:
        """Return the last tokens' hidden states, [P, H]."""


def score_packed(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    head: ScoreHead,
    *,
    run: LastHidden | None = None,
) -> Tensor:
    """Score the prompts in one row without padding; returns fp32 scores of shape [P].

    Args:
        model: What scores.
        prompts: Token ids; none is empty.
        head: What of the last hidden state is the score.
        run: Runs the model, where it is not simply called.
    """
    device = _device(model)
    lengths = _lengths(prompts)
    positions = torch.cat([torch.arange(length) for length in lengths])
    _check_length(model, max(lengths))
    hidden_PH = (run or partial(last_hidden, model))(
        input_ids=sent(torch.tensor([[token for prompt in prompts for token in prompt]]), device),
        position_ids=sent(positions.unsqueeze(0), device),
        segments=Segments.of(lengths, device),
    )
    return project(model, hidden_PH, head)


def last_hidden(
    model: PreTrainedModel, *, input_ids: Tensor, position_ids: Tensor, segments: Segments
) -> Tensor:
    """Return the hidden states of the segments' last tokens, [P, H], of a packed row, [1, T]."""
    hidden_1TH = _hidden(model, input_ids=input_ids, position_ids=position_ids, segments=segments)
    return hidden_1TH[0].index_select(0, segments.cu_seq_lens[1:] - 1)


def score_padded(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    head: ScoreHead,
    *,
    pad_to_multiple_of: int = 1,
) -> Tensor:
    """Score the prompts in rows padded on the right; returns fp32 scores of shape [P].

    No mask is needed: a causal model's last real token never sees the padding after it.
    """
    device = _device(model)
    lengths = _lengths(prompts)
    width = -(-max(lengths) // pad_to_multiple_of) * pad_to_multiple_of
    rows = [[*prompt, *([prompt[-1]] * (width - len(prompt)))] for prompt in prompts]
    _check_length(model, width)
    hidden_PSH = _hidden(
        model,
        input_ids=sent(torch.tensor(rows), device),
        position_ids=torch.arange(width, device=device).expand(len(rows), -1),
        segments=None,
    )
    last_P = sent(torch.tensor(lengths) - 1, device)
    return project(model, hidden_PSH[torch.arange(len(rows), device=device), last_P], head)


def longest_prompt(config: PreTrainedConfig) -> int | None:
    """Return how long a prompt may be until the model's rotary positions depend on the longest one of the pass.

    Dynamic and longrope scaling look at the highest position of a forward pass: beyond this length a prompt's score
    would depend on its neighbours, and with dynamic scaling on what was scored before. None for other models.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    limits = []
    for part in parts:
        kind = str(part.get("rope_type", "default"))
        if "dynamic" in kind or kind == "longrope":
            own = part.get("original_max_position_embeddings")
            own = own or getattr(text, "original_max_position_embeddings", None)
            limits.append(int(own or text.max_position_embeddings))
    return min(limits, default=None)


def project(model: PreTrainedModel, hidden_PH: Tensor, head: ScoreHead) -> Tensor:
    """Turn the last tokens' hidden states, [P, H], into fp32 scores of shape [P]."""
    # fp32 whatever the model and autocast say: a difference of two bf16 logits has two digits left.
    with torch.autocast(hidden_PH.device.type, enabled=False):
        if isinstance(head, SeqClsHead):
            score = model.get_submodule("score")
            assert isinstance(score, nn.Linear), "load_model checks the head"
            return nn.functional.linear(hidden_PH.float(), score.weight.float()).squeeze(-1)
        logits_P2 = _answer_logits(model, hidden_PH, head)
        return logits_P2[:, 0] - logits_P2[:, 1]


def _answer_logits(model: PreTrainedModel, hidden_PH: Tensor, head: YesNoHead) -> Tensor:
    output = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    assert isinstance(output, nn.Linear), "load_model checks the head"
    rows = sent(torch.tensor([head.yes, head.no]), hidden_PH.device)
    bias = None if output.bias is None else output.bias.index_select(0, rows).float()
    weight_2H = output.weight.index_select(0, rows).float()
    logits_P2 = nn.functional.linear(hidden_PH.float(), weight_2H, bias)
    cap: float | None = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return logits_P2 if cap is None else torch.tanh(logits_P2 / cap) * cap


def _check_length(model: PreTrainedModel, longest: int) -> None:
    limit = longest_prompt(model.config)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens: beyond {limit} tokens this model's scores depend on what else is in a pass"
        )


def _hidden(
    model: PreTrainedModel, *, input_ids: Tensor, position_ids: Tensor, segments: Segments | None
) -> Tensor:
    extra = {} if segments is None else {"segments": segments}
    backbone: nn.Module = model.base_model
    output = backbone(input_ids=input_ids, position_ids=position_ids, use_cache=False, **extra)
    hidden = output.last_hidden_state
    assert isinstance(hidden, Tensor)
    return hidden


def _device(model: PreTrainedModel) -> torch.device:
    return next(model.parameters()).device


def _lengths(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    lengths = tuple(len(prompt) for prompt in prompts)
    if not lengths or min(lengths) == 0:
        raise ValueError(
            f"expected at least one prompt and no empty one, got lengths {list(lengths)}"
        )
    return lengths
