"""Megatron-FSDP trains as plain replicas do, with a share of what they hold, and its states and exports are as theirs."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.megatron.ranks import on_ranks
from tests.megatron.runs import (
    Layout,
    arguments,
    engine,
    export_job,
    largest_difference,
    losses,
    model_folder,
    run,
    scores_and_steps,
)

from tevatron.core.contracts.train import TrainArguments

TWO: Layout = (2, 1, 1, 1)
FULL = pytest.mark.full
SHARDED = {"use_megatron_fsdp": True}


def sharded(
    layout: Layout = TWO, strategy: str = "optim_grads_params", **changes
) -> TrainArguments:
    own = {**SHARDED, "data_parallel_sharding_strategy": strategy, **changes.pop("megatron", {})}
    return arguments(layout, megatron=own, **changes)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory):
    """Scores and steps of plain replicas, by kind of model."""
    made: dict[str, tuple[Path, tuple[list[float], list[tuple[float, float]]]]] = {}

    def get(kind: str):
        if kind not in made:
            folder = model_folder(tmp_path_factory.mktemp(kind) / kind, kind)
            made[kind] = folder, on_ranks(2, scores_and_steps, folder, arguments(TWO), 20)[0]
        return made[kind]

    return get


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param("llama", "optim", marks=FULL),
        ("llama", "optim_grads"),
        ("llama", "optim_grads_params"),
        pytest.param("qwen3", "optim", marks=FULL),
        pytest.param("qwen3", "optim_grads", marks=FULL),
        ("qwen3", "optim_grads_params"),
    ],
)
def test_twenty_steps_are_those_of_plain_replicas(plain, kind: str, strategy: str):
    """In several passes each; llama's embeddings are tied, the output layer of the other is used without its forward."""
    folder, (scores, steps) = plain(kind)
    options = sharded(strategy=strategy)
    for other_scores, other in on_ranks(2, scores_and_steps, folder, options, 20):
        assert other_scores == pytest.approx(scores, abs=1e-5)
        assert other[0] == pytest.approx(steps[0], rel=1e-5)
        assert [loss for loss, _ in other] == pytest.approx([loss for loss, _ in steps], abs=1e-4)
    assert steps[-1][0] < steps[0][0] / 2


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((4, 2, 1, 1), {"gradient_checkpointing": True}),
        (TWO, {"packing": False}),
        (TWO, {"megatron": {"context_parallel_size": 2}}),
    ],
)
def test_what_else_cuts_a_model_goes_with_it(tmp_path: Path, layout: Layout, changes):
    folder = model_folder(tmp_path / "qwen3", "qwen3")
    options = {"gradient_checkpointing": False, **changes}
    _, steps = on_ranks(layout[0], scores_and_steps, folder, arguments(layout, **options), 3)[0]
    _, other = on_ranks(layout[0], scores_and_steps, folder, sharded(layout, **options), 3)[0]
    assert other == [pytest.approx(step, rel=1e-5) for step in steps]


def held(folder: Path, options: TrainArguments) -> dict[str, int]:
    """Return the numbers that this rank holds between two steps, as they lie in memory."""
    made = engine(folder, options)
    groups = made.model.chunks[0].param_and_grad_buffer.parameter_groups
    return {
        "all": sum(one.numel() for one in made.model.trainable().values()),
        "weights": sum(group.model_weight_buffer.data.numel() for group in groups),
        "gradients": sum(group.main_grad_buffer.data.numel() for group in groups),
        "optimizer": sum(
            one.to_local().numel()
            for group in made.optimizer.param_groups
            for one in group["params"]
        ),
    }


@pytest.mark.parametrize(
    ("strategy", "cut"),
    [
        ("optim", {"optimizer"}),
        ("optim_grads", {"optimizer", "gradients"}),
        ("optim_grads_params", {"optimizer", "gradients", "weights"}),
    ],
)
def test_a_rank_holds_its_share(tmp_path: Path, strategy: str, cut: set[str]):
    folder = model_folder(tmp_path / "qwen3", "qwen3")
    ranks = on_ranks(4, held, folder, sharded((4, 1, 1, 1), strategy))
    for part in ("weights", "gradients", "optimizer"):
        share = [found[part] / found["all"] for found in ranks]
        # No row is divided, and what is missing to a multiple of the ranks is padded.
        assert share == pytest.approx([0.25 if part in cut else 1.0] * 4, abs=0.05)
    assert sum(found["optimizer"] for found in ranks) == ranks[0]["all"]


@pytest.mark.parametrize(
    ("kind", "strategy", "layout", "then", "changes"),
    [
        ("qwen3", "optim_grads_params", TWO, TWO, {}),
        ("llama", "optim_grads_params", TWO, (3, 1, 1, 1), {}),
        pytest.param("llama", "optim_grads", TWO, TWO, {"dtype": "bfloat16"}, marks=FULL),
        pytest.param("qwen3", "optim_grads_params", (4, 2, 1, 1), (2, 2, 1, 1), {}, marks=FULL),
    ],
)
def test_states_and_exports_are_as_those_of_plain_replicas(
    tmp_path: Path, kind: str, strategy: str, layout: Layout, then: Layout, changes
):
    """A run goes on with as many replicas or others, all that is sharded; an export job, a plain process, reads the state."""
    own = {"megatron": {**SHARDED, "data_parallel_sharding_strategy": strategy}, **changes}
    size = 12 * layout[1] // layout[0]
    out = run(tmp_path, kind, layout, per_device_train_batch_size=size, **own)
    unbroken = losses(out)
    newest = export_job(tmp_path, "newest")
    for published in (out / "export", newest):
        # In bf16 the arithmetic of transformers differs from Megatron's by as much for plain replicas.
        assert largest_difference(published) < (0.05 if "dtype" in changes else 1e-4)
    one, other = (load_file(folder / "model.safetensors") for folder in (out / "export", newest))
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-6)
    shutil.rmtree(out / "states" / "step-6")
    (out / "events.jsonl").unlink()
    size = 12 * then[1] // then[0]
    own["megatron"] = SHARDED
    run(tmp_path, kind, then, per_device_train_batch_size=size, **own)
    assert losses(out) == pytest.approx(unbroken[3:], abs=1e-5)


def test_what_is_published_on_the_way_leaves_the_training_as_it_was(tmp_path: Path):
    """A state is written beside each; the last weights of a sharded run are those of a plain one."""
    own = {"max_steps": 4, "save_steps": 2, "per_device_train_batch_size": 2}
    out = run(tmp_path, "qwen3", TWO, megatron={**SHARDED, "export_steps": 2}, **own)
    sharded_losses = losses(out)
    published = out / "exports" / "step-2"
    assert largest_difference(published) < 1e-4
    one = load_file(published / "model.safetensors")
    other = load_file(export_job(tmp_path, "other", step=2) / "model.safetensors")
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-6)
    shutil.rmtree(out)
    assert losses(run(tmp_path, "qwen3", TWO, **own)) == pytest.approx(sharded_losses, abs=1e-4)


def test_a_state_of_plain_replicas_is_refused(tmp_path: Path):
    run(tmp_path, "llama", TWO, max_steps=3)
    shutil.rmtree(tmp_path / "run" / "export")
    message = "step-3 was saved with .* this run has .*'use_megatron_fsdp': 1"
    with pytest.raises(AssertionError, match=message):
        run(tmp_path, "llama", TWO, megatron=SHARDED)


@pytest.mark.parametrize(
    ("kind", "layout", "changes", "message"),
    [
        ("llama", (2, 1, 2, 1), {}, "needs pipeline_model_parallel_size 1, got 2"),
        ("qwen3_moe", (2, 1, 1, 2), {}, "is for dense models, this one has 4 experts a layer"),
        ("llama", TWO, {"use_lora": True}, "is for full fine-tuning: with --use_lora few"),
        ("llama", TWO, {"dtype": "float16"}, "trains in bfloat16 or float32, got --dtype float16"),
        (
            "llama",
            TWO,
            {"megatron": {"use_distributed_optimizer": False}},
            "needs use_distributed_op",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_anything_loads(
    tmp_path: Path, kind: str, layout: Layout, changes, message: str
):
    own = {**SHARDED, **changes.pop("megatron", {})}
    with pytest.raises(AssertionError, match=f"ConfigError: use_megatron_fsdp {message}"):
        run(tmp_path, kind, layout, megatron=own, **changes)
