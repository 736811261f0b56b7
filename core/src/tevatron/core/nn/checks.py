"""Proof that a loaded model may be scored packed: its own logits, one prompt at a time, must come out.

Owns what is refused by its config, and the comparison on three short prompts. A model whose attention, logits or
layers do something that the packed pass leaves out fails here, by name, and never scores differently in silence.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError
from tevatron.core.nn.attention import ATTENTION, recorded_windows
from tevatron.core.nn.forward import (
    ScoreHead,
    SeqClsHead,
    YesNoHead,
    longest_prompt,
    score_packed,
    score_padded,
)

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_LENGTHS = (5, 9, 3)
# Of the scale of the logits. bf16 keeps 8 bits, and the errors of the layers add up.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1.5e-1}


def refuse_unsupported(config: PreTrainedConfig) -> None:
    """Raise `ConfigError` for architectures that this forward pass cannot compute."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"model_type '{config.model_type}' is an encoder-decoder; expected a decoder"
        )
    if getattr(text, "attn_logit_softcapping", None) is not None:
        raise ConfigError(
            f"model_type '{config.model_type}' caps its attention logits, which is not supported"
        )
    others = sorted(set(getattr(text, "layer_types", None) or ()) - LAYER_TYPES)
    if others:
        raise ConfigError(
            f"model_type '{config.model_type}' has layers of type {', '.join(others)}; "
            f"supported are {', '.join(sorted(LAYER_TYPES))}"
        )


def check_length(config: PreTrainedConfig, max_length: int) -> None:
    """Raise `ConfigError` where prompts may be so long that a score would depend on its neighbours in a pass."""
    limit = longest_prompt(config)
    if limit is not None and max_length > limit:
        raise ConfigError(
            f"model_type '{config.model_type}' stretches its rotary positions for prompts over {limit} tokens, so that "
            f"scores would depend on what else is in a pass: expected rerank_max_len {limit} at most, got {max_length}"
        )


def check_forward(model: PreTrainedModel, head: Head, *, attention: str = ATTENTION) -> None:
    """Set the attention function and compare our scores with transformers' own logits on three short prompts."""
    config = model.config.get_text_config()
    if attention == ATTENTION and not getattr(model, "_supports_attention_backend", False):
        raise ConfigError(
            f"model_type '{config.model_type}' takes no attention function; it cannot be packed"
        )
    prompts = _prompts(config)
    rows: ScoreHead = (
        SeqClsHead() if head is Head.SEQ_CLS else YesNoHead(yes=prompts[0][0], no=prompts[0][1])
    )
    with torch.no_grad():
        expected, scale = _own_scores(model, prompts, rows)
        model.set_attn_implementation(attention)
        if attention == ATTENTION:
            with recorded_windows() as windows:
                got = score_packed(model, prompts, rows)
            _check_windows(config, windows)
        else:
            got = score_padded(model, prompts, rows)
    worst = float((got - expected).abs().max())
    allowed = _TOLERANCES[model.dtype] * max(1.0, scale)
    if not worst <= allowed:
        raise ConfigError(
            f"model_type '{config.model_type}' does not score as transformers does: scores differ by {worst:.3g}, "
            f"allowed {allowed:.3g}; it cannot be trained or served here"
        )


def _prompts(config: PreTrainedConfig) -> list[list[int]]:
    pad = config.pad_token_id
    tokens = (token for token in range(config.vocab_size) if token != pad)
    ids = [token for token, _ in zip(tokens, range(sum(_LENGTHS)), strict=False)]
    ids = (ids * sum(_LENGTHS))[: sum(_LENGTHS)]
    starts = [sum(_LENGTHS[:index]) for index in range(len(_LENGTHS))]
    return [ids[start : start + length] for start, length in zip(starts, _LENGTHS, strict=True)]


def _own_scores(
    model: PreTrainedModel, prompts: list[list[int]], head: ScoreHead
) -> tuple[Tensor, float]:
    scores = []
    scale = 0.0
    for prompt in prompts:
        input_ids = torch.tensor([prompt], device=model.device)
        if isinstance(head, SeqClsHead):
            logits = model(input_ids=input_ids).logits[0].float()
            scores.append(logits[0])
        else:
            logits = model(input_ids=input_ids, use_cache=False).logits[0, -1].float()
            scores.append(logits[head.yes] - logits[head.no])
        scale = max(scale, float(logits.abs().max()))
    return torch.stack(scores), scale


def _check_windows(config: PreTrainedConfig, windows: list[int | None]) -> None:
    """Refuse a model that keeps its sliding window in the mask alone, where packed attention cannot see it."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        expected = sum(kind == "sliding_attention" for kind in types)
    else:
        expected = config.num_hidden_layers if getattr(config, "sliding_window", None) else 0
    got = sum(window is not None for window in windows)
    if got != expected:
        raise ConfigError(
            f"model_type '{config.model_type}' has {expected} layers with a sliding window, "
            f"{got} of them tell it to the attention function; it cannot be packed"
        )
