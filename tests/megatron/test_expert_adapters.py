"""Adapters on experts: one pair for a layer or one for each, grouped or sequential, the same on every layout."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.megatron.ranks import on_ranks
from tests.megatron.runs import (
    Layout,
    arguments,
    largest_difference,
    model_folder,
    num_trained,
    run,
    scores_and_steps,
)

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.model_shape import ModelShape
from tevatron.core.plan.megatron import num_trained as planned

KINDS = {
    "shared": {"lora_expert_adapters": "shared"},
    "per_expert": {"lora_expert_adapters": "per_expert"},
    "sequential": {"moe_grouped_gemm": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("moe") / "qwen3_moe", "qwen3_moe")


def options(layout: Layout, kind: str, **changes: object) -> TrainArguments:
    return arguments(
        layout,
        use_lora=True,
        lora_target_groups=["moe_experts"],
        packing_max_tokens=512,
        megatron=KINDS[kind],
        **changes,
    )


def steps(folder: Path, layout: Layout, kind: str) -> list[tuple[float, float]]:
    return on_ranks(layout[0], scores_and_steps, folder, options(layout, kind), 6)[0][1]


LAYOUTS: list[Layout] = [(2, 1, 1, 2), (2, 2, 1, 1), (4, 2, 1, 2)]


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("shared", LAYOUTS[2:]),
        ("per_expert", LAYOUTS[2:]),
        pytest.param("shared", LAYOUTS[:2], marks=pytest.mark.full),
        pytest.param("per_expert", LAYOUTS[:2], marks=pytest.mark.full),
        pytest.param("sequential", LAYOUTS, marks=pytest.mark.full),
    ],
)
def test_a_layout_does_not_change_the_training(folder: Path, kind: str, layouts: list[Layout]):
    one = steps(folder, (1, 1, 1, 1), kind)
    assert one[-1][0] < one[0][0]
    for layout in layouts:
        other = steps(folder, layout, kind)
        for (loss, norm), (other_loss, other_norm) in zip(one, other, strict=True):
            assert other_loss == pytest.approx(loss, abs=1e-4), layout
            assert other_norm == pytest.approx(norm, rel=1e-4), layout


def test_sequential_experts_train_like_grouped_ones_with_a_pair_each(folder: Path):
    grouped = steps(folder, (1, 1, 1, 1), "per_expert")
    sequential = steps(folder, (1, 1, 1, 1), "sequential")
    assert sequential == [pytest.approx(step, rel=1e-4) for step in grouped]


@pytest.mark.parametrize(("kind", "pairs"), [("shared", 1), ("per_expert", 4), ("sequential", 4)])
def test_the_trained_parameters_are_as_many_as_the_plan_says(folder: Path, kind: str, pairs: int):
    """Two layers of four experts 32 -> 2 x 16 -> 32; rank 16."""
    (trained,) = on_ranks(1, num_trained, folder, options((1, 1, 1, 1), kind))
    assert trained == 2 * pairs * 16 * ((32 + 2 * 16) + (16 + 32))
    assert planned(ModelShape.read(folder), options((1, 1, 1, 1), kind)) == trained


@pytest.mark.parametrize(
    "kind", ["shared", "per_expert", pytest.param("sequential", marks=pytest.mark.full)]
)
def test_the_merged_checkpoint_shows_the_kind(tmp_path: Path, kind: str):
    """A pair for the layer changes all experts alike; a pair each changes each its own way."""
    out = run(
        tmp_path,
        "qwen3_moe",
        (2, 1, 1, 2),
        max_steps=2,
        learning_rate=1e-2,
        use_lora=True,
        lora_target_groups=["moe_experts"],
        megatron=KINDS[kind],
    )
    assert largest_difference(out / "export") < 1e-4
    before = load_file(tmp_path / "qwen3_moe" / "model.safetensors")
    after = load_file(out / "export" / "model.safetensors")
    names = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(4)]
    first, *others = [after[name] - before[name] for name in names]
    assert first.abs().max() > 1e-4
    alike = [torch.allclose(first, other, atol=1e-6) for other in others]
    assert alike == [kind == "shared"] * 3
