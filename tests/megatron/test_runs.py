"""Whole runs: published checkpoints score in transformers as in training, and a resumed run is the unbroken one."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.megatron.ranks import on_ranks
from tests.megatron.runs import (
    Layout,
    arguments,
    events,
    export_job,
    largest_difference,
    losses,
    run,
)

from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.contracts.run import TrainRun
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.settings import RankEnvironment
from tevatron.trainer.program.train import train_with

FULL = pytest.mark.full
ATTENTION_AND_EXPERTS = ["attn", "moe_experts", "moe_shared"]
"""The paper's list; Qwen3's mixtures have no shared experts, so the last one is a warning."""


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param("llama", (1, 1, 1, 1), marks=FULL),
        ("qwen3", (2, 2, 1, 1)),
        ("llama", (2, 1, 2, 1)),
        pytest.param("qwen3_moe", (2, 1, 1, 2), marks=FULL),
    ],
)
def test_full_fine_tuning_is_published(tmp_path: Path, kind: str, layout: Layout):
    out = run(tmp_path, kind, layout, max_steps=2)
    assert largest_difference(out / "export") < 1e-4


@pytest.mark.parametrize(
    ("kind", "layout", "groups"),
    [
        ("llama", (1, 1, 1, 1), None),
        ("qwen3", (2, 2, 1, 1), ["attn", "mlp"]),
        pytest.param("llama", (2, 1, 2, 1), ["mlp"], marks=FULL),
        pytest.param("qwen3_moe", (1, 1, 1, 1), ATTENTION_AND_EXPERTS, marks=FULL),
        pytest.param("qwen3_moe", (2, 1, 2, 1), ["moe_experts"], marks=FULL),
        ("qwen3_moe", (2, 2, 1, 1), ATTENTION_AND_EXPERTS),
        ("qwen3_moe", (2, 1, 1, 2), ATTENTION_AND_EXPERTS),
    ],
)
def test_adapters_are_merged_into_what_is_published(
    tmp_path: Path, kind: str, layout: Layout, groups: list[str] | None
):
    out = run(
        tmp_path,
        kind,
        layout,
        max_steps=2,
        use_lora=True,
        learning_rate=1e-2,
        lora_target_groups=groups,
    )
    assert largest_difference(out / "export") < 1e-4
    before = load_file(tmp_path / kind / "model.safetensors")
    after = load_file(out / "export" / "model.safetensors")
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed, "nothing was trained"
    # Embeddings, norms and routers are no targets.
    assert not [name for name in changed if "embed" in name or "norm" in name or ".gate." in name]
    if "moe_experts" in (groups or []):
        assert any(".experts." in name for name in changed)


def test_both_backends_train_alike(tmp_path: Path):
    """The same seed, data and budget give the same losses, by the Hugging Face Trainer and by Megatron."""
    out = run(tmp_path, "qwen3", (1, 1, 1, 1))
    ours = losses(out)
    other = tmp_path / "other"
    other.mkdir()
    on_ranks(1, hf_run, tmp_path / "qwen3", tmp_path / "data.jsonl", other)
    assert losses(other) == pytest.approx(ours, abs=1e-4)
    norms = [[line["grad_norm"] for line in events(out, "metrics")] for out in (other, out)]
    assert norms[0][0] == pytest.approx(norms[1][0], rel=1e-5)


def hf_run(folder: Path, data: Path, out: Path) -> None:
    config = TrainRun(
        model_name_or_path=str(folder),
        dataset_path=str(data),
        output_dir=out,
        base_model="base",
        arguments=arguments().model_copy(update={"megatron": MegatronArguments()}),
    )
    train_with(config, RankEnvironment.read(), EventWriter(out, rank=0))


@pytest.mark.parametrize(
    ("kind", "layout", "then", "changes"),
    [
        ("llama", (2, 2, 1, 1), (2, 2, 1, 1), {}),
        ("qwen3_moe", (2, 1, 1, 2), (2, 1, 1, 2), {"use_lora": True}),
        pytest.param(
            "qwen3_moe",
            (2, 1, 1, 2),
            (2, 1, 1, 2),
            {"use_lora": True, "lora_target_groups": ["moe_experts"]},
            marks=FULL,
        ),
        pytest.param(
            "qwen3_moe",
            (2, 1, 1, 2),
            (2, 1, 1, 2),
            {"use_lora": True, "lora_target_groups": ["attn"]},
            marks=FULL,
        ),
        ("qwen3", (1, 1, 1, 1), (2, 1, 1, 1), {}),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(
    tmp_path: Path, kind: str, layout: Layout, then: Layout, changes: dict[str, object]
):
    """In the last case the run goes on with two replicas, each with half of the queries."""
    out = run(tmp_path, kind, layout, **changes)
    unbroken = losses(out)
    shutil.rmtree(out / "states" / "step-6")
    (out / "events.jsonl").unlink()
    size = 4 * layout[0] // then[0]
    run(tmp_path, kind, then, per_device_train_batch_size=size, **changes)
    assert losses(out) == pytest.approx(unbroken[3:], abs=1e-5)


def test_a_state_of_another_layout_is_refused(tmp_path: Path):
    run(tmp_path, "llama", (1, 1, 1, 1), max_steps=3)
    shutil.rmtree(tmp_path / "run" / "export")
    with pytest.raises(
        AssertionError, match=r"step-3 was saved with .* only the number of replicas"
    ):
        run(tmp_path, "llama", (2, 2, 1, 1))


@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [
        pytest.param("qwen3", (2, 2, 1, 1), {}, marks=FULL),
        ("qwen3_moe", (2, 1, 1, 2), {}),
        ("qwen3_moe", (2, 1, 2, 1), {"use_lora": True}),
        pytest.param("qwen3_moe", (2, 1, 1, 2), {"use_lora": True}, marks=FULL),
    ],
)
def test_a_state_of_any_layout_is_exported_by_one_process(
    tmp_path: Path, kind: str, layout: Layout, changes: dict[str, object]
):
    out = run(tmp_path, kind, layout, learning_rate=1e-2, **changes)
    assert largest_difference(export_job(tmp_path, "older", step=3)) < 1e-4
    newest = export_job(tmp_path, "newest")
    assert largest_difference(newest) < 1e-4
    one, other = (load_file(folder / "model.safetensors") for folder in (out / "export", newest))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-6)


def test_checkpoints_are_published_on_the_way(tmp_path: Path):
    """Each is proved like the last one, and is what an export job makes of that step's state."""
    out = run(
        tmp_path, "llama", (2, 2, 1, 1), max_steps=4, save_steps=2, megatron={"export_steps": 2}
    )
    published = out / "exports" / "step-2"
    assert [path.name for path in (out / "exports").iterdir()] == ["step-2"]
    assert largest_difference(published) < 1e-4
    told = [line["message"] for line in events(out, "log")]
    assert "step 2 is published as exports/step-2" in told
    one = load_file(published / "model.safetensors")
    other = load_file(export_job(tmp_path, "other", step=2) / "model.safetensors")
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-6)
    last = load_file(out / "export" / "model.safetensors")
    assert any(not torch.equal(last[name], weight) for name, weight in one.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_target_groups": ["atn"]}, "Did you mean"),
        ({"lora_target_modules": ["q_proj"]}, "module 'q_proj' matches no module of this model"),
        ({"lora_target_groups": ["moe_experts"]}, "what was asked for matches no module"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_by_name(
    tmp_path: Path, changes: dict[str, object], message: str
):
    with pytest.raises(AssertionError, match=message):
        run(tmp_path, "llama", (1, 1, 1, 1), use_lora=True, **changes)


def test_adapters_on_routers_are_refused_where_their_tokens_are_divided(tmp_path: Path):
    with pytest.raises(AssertionError, match="on the routers needs tensor_model_parallel_size 1"):
        run(tmp_path, "qwen3_moe", (2, 2, 1, 1), use_lora=True, lora_target_groups=["moe_router"])


def test_padded_prompts_cannot_be_shared(tmp_path: Path):
    with pytest.raises(AssertionError, match="context_parallel_size 2 needs packed prompts"):
        run(tmp_path, "llama", (2, 1, 1, 1), packing=False, megatron={"context_parallel_size": 2})


def test_a_layout_that_does_not_fit_is_refused_before_anything_loads(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"must divide the model's 2 key-value heads"):
        run(tmp_path, "llama", (4, 4, 1, 1))
