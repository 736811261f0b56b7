"""Scores against transformers' own full logits, prompt by prompt."""

import pytest
import torch
from tests.support.tiny_model import tiny_config
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tevatron.core.errors import ConfigError
from tevatron.core.nn.attention import ATTENTION, register
from tevatron.core.nn.forward import (
    SeqClsHead,
    YesNoHead,
    longest_prompt,
    score_packed,
    score_padded,
)

PROMPTS = [[5, 6, 7], [1], [9, 8, 7, 6, 5, 4, 3, 2, 1, 11], [5, 6, 7, 8], [200] * 17]
HEAD = YesNoHead(yes=30, no=40)


def own_logits(model, prompt):
    return model(input_ids=torch.tensor([prompt])).logits[0, -1]


def causal(kind, **changes):
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(tiny_config(kind, **changes)).eval()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    ],
)
def test_packed_and_padded_scores_are_the_difference_of_the_models_own_logits(kind, changes):
    model = causal(kind, **changes)
    with torch.no_grad():
        logits = torch.stack([own_logits(model, prompt) for prompt in PROMPTS])
        expected = logits[:, 30] - logits[:, 40]
        padded = score_padded(model, PROMPTS, HEAD, pad_to_multiple_of=16)
        register()
        model.set_attn_implementation(ATTENTION)
        packed = score_packed(model, PROMPTS, HEAD)
    torch.testing.assert_close(packed, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(padded, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(packed, padded, atol=1e-5, rtol=0)


def test_seq_cls_scores_are_the_models_own():
    torch.manual_seed(3)
    config = tiny_config("llama", num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        expected = torch.cat([model(input_ids=torch.tensor([p])).logits[0] for p in PROMPTS])
        padded = score_padded(model, PROMPTS, SeqClsHead())
        register()
        model.set_attn_implementation(ATTENTION)
        packed = score_packed(model, PROMPTS, SeqClsHead())
    torch.testing.assert_close(packed, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(padded, expected, atol=1e-4, rtol=0)


def test_the_final_softcap_is_honoured():
    model = causal("llama")
    with torch.no_grad():
        logits = own_logits(model, PROMPTS[0])
        model.config.final_logit_softcapping = 0.7
        capped = score_padded(model, PROMPTS[:1], HEAD)
    expected = 0.7 * torch.tanh(logits[30] / 0.7) - 0.7 * torch.tanh(logits[40] / 0.7)
    assert capped.item() == pytest.approx(expected.item(), abs=1e-4)


def test_a_bf16_model_scores_in_fp32():
    model = causal("llama").to(torch.bfloat16)
    register()
    model.set_attn_implementation(ATTENTION)
    with torch.no_grad():
        scores = score_packed(model, PROMPTS, HEAD)
    assert scores.dtype == torch.float32
    assert not torch.equal(scores, scores.to(torch.bfloat16).float())


def test_autocast_does_not_reach_the_two_rows():
    model = causal("llama")
    register()
    model.set_attn_implementation(ATTENTION)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = score_packed(model, PROMPTS, HEAD)
    assert scores.dtype == torch.float32


def test_gradients_are_the_same_packed_and_padded_and_checkpointed():
    def gradients(score, checkpointing):
        model = causal("qwen3").train()
        if score is score_packed:
            model.set_attn_implementation(ATTENTION)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        score(model, PROMPTS, HEAD).square().sum().backward()
        return [p.grad for p in model.parameters()]

    register()
    plain = gradients(score_padded, False)
    assert all(gradient is not None and gradient.isfinite().all() for gradient in plain)
    for other in (gradients(score_packed, False), gradients(score_packed, True)):
        for one, two in zip(plain, other, strict=True):
            torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"no empty one, got lengths \[1, 0\]"):
        score_packed(causal("llama"), [[1], []], HEAD)


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 16,
}


@pytest.mark.parametrize(
    ("rope", "limit"),
    [(None, None), (DYNAMIC, 16), (LONGROPE, 16)],
    ids=["none", "dynamic", "longrope"],
)
def test_a_prompt_that_would_change_its_neighbours_scores_is_refused(rope, limit):
    changes = {} if rope is None else {"rope_parameters": dict(rope), "max_position_embeddings": 16}
    model = causal("llama", **changes)
    register()
    model.set_attn_implementation(ATTENTION)
    assert longest_prompt(model.config) == limit
    short, fitting, over = [1, 2, 3], [7] * 16, [7] * 17
    with torch.no_grad():
        alone = score_packed(model, [short], HEAD)
        assert torch.equal(
            score_packed(model, [short, fitting], HEAD)[:1].round(decimals=4),
            alone.round(decimals=4),
        )
        if limit is None:
            torch.testing.assert_close(score_packed(model, [short, over], HEAD)[:1], alone)
            return
        for score in (score_packed, score_padded):
            with pytest.raises(ConfigError, match="a prompt of 17 tokens: beyond 16 tokens"):
                score(model, [short, over], HEAD)
