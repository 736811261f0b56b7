"""A layout changes nothing: scores, gradient norms and losses are those of one rank, of transformers and of the hf backend."""

from pathlib import Path

import pytest
import torch
from tests.megatron.ranks import on_ranks
from tests.megatron.runs import (
    HEAD,
    PROMPTS,
    Layout,
    arguments,
    groups,
    model_folder,
    scores_and_steps,
)
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GraniteConfig,
)

from tevatron.core.errors import ConfigError
from tevatron.core.nn.attention import ATTENTION, register
from tevatron.core.nn.forward import score_packed
from tevatron.trainer.program.backends.megatron.scoring import check_logits

ONE: Layout = (1, 1, 1, 1)
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = model_folder(tmp_path_factory.mktemp(kind) / kind, kind)
        return made[kind]

    return get


def own_scores(folder: Path) -> list[float]:
    """Return transformers' own scores, one prompt at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS]
    return [float(one[HEAD.yes] - one[HEAD.no]) for one in logits]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama", (1, 1, 1, 1)),
        pytest.param("llama", (2, 1, 2, 1), marks=FULL),
        ("qwen2", (2, 2, 1, 1)),
        ("qwen3", (2, 2, 1, 1)),
        ("qwen3", (4, 2, 2, 1)),
        ("qwen3_moe", (2, 1, 1, 2)),
        pytest.param("qwen3_moe", (2, 1, 2, 1), marks=FULL),
        ("qwen3_moe", (4, 2, 1, 2)),
    ],
)
def test_forward_equals_transformers(folder, kind: str, layout: Layout):
    """The two answers' rows lie in different shards at TP=2; llama's embeddings are tied, the others' are not."""
    answers = on_ranks(layout[0], scores_and_steps, folder(kind), arguments(layout), 0)
    for scores, _ in answers:
        assert scores == pytest.approx(own_scores(folder(kind)), abs=1e-4)


def test_an_architecture_that_the_bridge_lacks_is_refused(folder):
    with pytest.raises(AssertionError, match="ConfigError: Megatron-Bridge cannot load"):
        on_ranks(1, scores_and_steps, folder("mixtral"), arguments(), 0)


@pytest.fixture(scope="module")
def twenty_steps(folder):
    """Return loss and gradient norm of each of twenty steps on a layout, made once."""
    made: dict[tuple[str, Layout], list[tuple[float, float]]] = {}

    def get(kind: str, layout: Layout) -> list[tuple[float, float]]:
        if (kind, layout) not in made:
            options = arguments(layout, packing_max_tokens=512)
            ranks = on_ranks(layout[0], scores_and_steps, folder(kind), options, 20)
            made[kind, layout] = ranks[0][1]
        return made[kind, layout]

    return get


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama", (2, 1, 1, 1)),
        ("llama", (4, 2, 2, 1)),
        pytest.param("llama", (2, 2, 1, 1), marks=FULL),
        pytest.param("llama", (2, 1, 2, 1), marks=FULL),
        ("qwen3_moe", (2, 1, 2, 1)),
        ("qwen3_moe", (4, 2, 1, 2)),
        pytest.param("qwen3_moe", (2, 2, 1, 1), marks=FULL),
        pytest.param("qwen3_moe", (2, 1, 1, 1), marks=FULL),
        pytest.param("qwen3_moe", (2, 1, 1, 2), marks=FULL),
    ],
)
def test_twenty_steps_are_the_same_on_every_layout(twenty_steps, kind: str, layout: Layout):
    one, other = twenty_steps(kind, ONE), twenty_steps(kind, layout)
    assert other[0] == pytest.approx(one[0], rel=1e-5)
    assert other[-1][0] == pytest.approx(one[-1][0], abs=1e-4)
    assert one[-1][0] < one[0][0] / 2


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_padded_rows_give_the_same_losses(folder, kind: str):
    packed = on_ranks(1, scores_and_steps, folder(kind), arguments(), 3)[0]
    padded = on_ranks(2, scores_and_steps, folder(kind), arguments((2, 2, 1, 1), packing=False), 3)
    assert padded[0][0] == pytest.approx(packed[0], abs=1e-4)
    for (loss, norm), (other_loss, other_norm) in zip(packed[1], padded[0][1], strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-4)
        assert other_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("llama", (2, 1, 1, 1)),
        pytest.param("qwen3", (4, 2, 1, 1), marks=FULL),
        ("qwen3_moe", (4, 1, 2, 2)),
    ],
)
def test_sharing_the_tokens_of_prompts_changes_nothing(folder, kind: str, layout: Layout):
    """Two ranks hold each prompt; its last token, and with it the score, is on one of them."""
    one = on_ranks(1, scores_and_steps, folder(kind), arguments(), 5)[0]
    options = arguments(layout, megatron={"context_parallel_size": 2})
    for scores, steps in on_ranks(layout[0], scores_and_steps, folder(kind), options, 5):
        assert scores == pytest.approx(own_scores(folder(kind)), abs=1e-4)
        for (loss, norm), (other_loss, other_norm) in zip(one[1], steps, strict=True):
            assert other_loss == pytest.approx(loss, abs=1e-4)
            assert other_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_recomputing_changes_nothing(folder, granularity: str):
    kept = on_ranks(2, scores_and_steps, folder("llama"), arguments((2, 2, 1, 1)), 2)[0]
    options = arguments(
        (2, 2, 1, 1),
        gradient_checkpointing=True,
        megatron={"recompute_granularity": granularity},
    )
    again = on_ranks(2, scores_and_steps, folder("llama"), options, 2)[0]
    assert again[1] == [pytest.approx(step, rel=1e-5) for step in kept[1]]


def test_the_first_gradient_norm_is_that_of_transformers(folder):
    """The same packed loss by core's forward pass and plain autograd, without Megatron."""
    register()
    model = AutoModelForCausalLM.from_pretrained(folder("qwen3"), dtype=torch.float32)
    model.set_attn_implementation(ATTENTION)
    total = torch.zeros(())
    for group in groups():
        total = total - score_packed(model, group.prompts, HEAD).log_softmax(0)[0] / 8
    total.backward()
    norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
    _, steps = on_ranks(1, scores_and_steps, folder("qwen3"), arguments(), 1)[0]
    assert steps[0] == pytest.approx((float(total), float(norm)), rel=1e-5)


def test_distillation_is_the_divergence_worked_out_by_hand(folder):
    """KL(teacher || model) at temperatures 2 and 1, mean over the groups, from this model's own scores."""
    register()
    model = AutoModelForCausalLM.from_pretrained(folder("llama"), dtype=torch.float32)
    model.set_attn_implementation(ATTENTION)
    total = 0.0
    with torch.no_grad():
        for group in groups(teacher=True):
            teacher = (torch.tensor(group.teacher) / 2).softmax(0)
            scores = score_packed(model, group.prompts, HEAD).log_softmax(0)
            total += float((teacher * (teacher.log() - scores)).sum())
    options = arguments((2, 1, 1, 1), loss="listwise_kl", teacher_temp=2.0)
    answers = on_ranks(2, scores_and_steps, folder("llama"), options, 1, teacher=True)
    assert answers[0][1][0][0] == pytest.approx(total / 8, rel=1e-5)


@pytest.mark.parametrize("kind", ["gemma2", "gemma3"])
def test_layers_that_only_transformer_engine_has_are_refused_by_name(folder, kind: str):
    message = "this model's layers .*Gemma.* need Transformer Engine, which is not installed"
    with pytest.raises(AssertionError, match=message):
        on_ranks(1, scores_and_steps, folder(kind), arguments(), 0)


def test_capped_attention_is_refused_where_prompts_are_packed():
    config = Gemma2Config()
    with pytest.raises(
        ConfigError, match=r"'gemma2' caps its attention at .*=50.0, .* --no_packing"
    ):
        check_logits(config, packing=True)
    check_logits(config, packing=False)
    check_logits(Gemma3TextConfig(), packing=True)


@pytest.mark.parametrize(
    ("config", "key"),
    [(GraniteConfig(logits_scaling=8.0), "logits_scaling"), (CohereConfig(), "logit_scale")],
)
def test_logits_that_are_scaled_are_refused(config, key: str):
    with pytest.raises(ConfigError, match=f"scales its logits by {key}="):
        check_logits(config, packing=True)
