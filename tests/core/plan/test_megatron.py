"""The arithmetic against peaks that were measured on two H200s, and against hand counts."""

import pytest
from tests.core.test_model_shape import QWEN3_8B, QWEN3_30B_A3B

from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.contracts.plan import GIB
from tevatron.core.contracts.train import TrainArguments
from tevatron.core.errors import ConfigError
from tevatron.core.layout import Layout
from tevatron.core.model_shape import ModelShape
from tevatron.core.plan import make_plan
from tevatron.core.plan.megatron import memory, num_trained

DENSE, EXPERTS = ModelShape.of(QWEN3_8B), ModelShape.of(QWEN3_30B_A3B)


def full(tokens: int, **megatron: object) -> TrainArguments:
    return TrainArguments(
        dtype="bfloat16", packing_max_tokens=tokens, megatron=MegatronArguments(**megatron)
    )


def lora(tokens: int, **megatron: object) -> TrainArguments:
    return full(tokens, **megatron).model_copy(update={"use_lora": True})


@pytest.mark.parametrize(
    ("shape", "arguments", "layout", "measured_gib"),
    [
        # docs/benchmarks.md; the tokens are those of the largest pass, which level packing keeps below the budget.
        (DENSE, full(8017), Layout(world=2, tensor=2), 87.9),
        (DENSE, full(11056), Layout(world=2, tensor=2), 95.0),
        (EXPERTS, lora(8187), Layout(world=2, expert=2), 71.2),
        # An earlier program, which filled one pass to the budget.
        (DENSE, full(16384), Layout(world=2, tensor=2), 108),
        (EXPERTS, lora(16384), Layout(world=2, expert=2), 119),
    ],
)
def test_measured_peaks_are_met_within_a_tenth(shape, arguments, layout, measured_gib):
    assert memory(shape, arguments, layout).total / GIB == pytest.approx(measured_gib, rel=0.1)


def test_states_of_8b_under_plain_data_parallelism_do_not_fit_an_h200():
    """The paper: about 128 GiB, out of memory on 140. 16 bytes a parameter, and 2 more for gradients in fp32."""
    arguments = TrainArguments(
        dtype="bfloat16", megatron=MegatronArguments(use_distributed_optimizer=False)
    )
    parts = memory(DENSE, arguments, Layout(world=8))
    states = parts.weights + parts.gradients + parts.optimizer
    assert states == pytest.approx(18 * DENSE.num_params, rel=1e-6)
    assert states / GIB == pytest.approx(128, rel=0.1)
    assert not make_plan(DENSE, arguments, backend="megatron", num_gpus=8, gpu_gib=139).asked.fits


def test_ranks_that_share_prompts_share_activations_and_optimizer():
    whole, shared = (
        memory(DENSE, full(8192), Layout(world=world, context=world)) for world in (1, 2)
    )
    assert shared.activations == pytest.approx(whole.activations / 2, rel=1e-6)
    assert shared.optimizer == pytest.approx(whole.optimizer / 2, rel=1e-6)
    assert shared.weights == whole.weights


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients"),
    [
        ("optim", 8190735360, 8190735360),
        # A quarter, and the output layer's gradient, which is larger than that of two layers.
        ("optim_grads", 8190735360, 2047683840 + 622329856),
        # A quarter, two layers and both ends.
        ("optim_grads_params", 2047683840 + 385892352 + 1244659712, 2047683840 + 622329856),
    ],
)
def test_what_megatron_fsdp_shards_is_shared_by_the_replicas(strategy, weights, gradients):
    own = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": strategy}
    arguments, layout = full(8192, **own), Layout(world=4)
    parts = memory(DENSE, arguments, layout)
    assert parts.weights == pytest.approx(2 * weights, rel=1e-4)
    assert parts.gradients == pytest.approx(4 * gradients, rel=1e-4)
    assert parts.optimizer == memory(DENSE, full(8192), layout).optimizer
    found = make_plan(DENSE, arguments, backend="megatron", num_gpus=4, gpu_gib=139)
    assert found.asked.layout == f"DP=4 FSDP {strategy}"
    assert {one.pipeline_model_parallel_size for one in found.fitting} == {1}


@pytest.mark.parametrize(
    ("shape", "changes", "own", "message"),
    [
        (DENSE, {}, {"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size 1, got 2"),
        (EXPERTS, {}, {"expert_model_parallel_size": 2}, "this one has 128 experts a layer"),
        (DENSE, {"use_lora": True}, {}, "full fine-tuning: with --use_lora few weights"),
        (DENSE, {"dtype": "float16"}, {}, "bfloat16 or float32, got --dtype float16"),
        (DENSE, {}, {"use_distributed_optimizer": False}, "use_distributed_optimizer, which was"),
    ],
)
def test_what_megatron_fsdp_cannot_cut_is_refused(shape, changes, own, message):
    arguments = full(8192, use_megatron_fsdp=True, **own).model_copy(update=changes)
    with pytest.raises(ConfigError, match=message):
        make_plan(shape, arguments, backend="megatron", num_gpus=4, gpu_gib=139)


def test_the_optimizer_is_shared_by_the_replicas():
    one, four = (memory(DENSE, full(8192), Layout(world=world)).optimizer for world in (1, 4))
    assert one == pytest.approx(4 * four, rel=1e-6)


def test_adapters_of_one_rank_are_counted_by_hand():
    """Rank 16 on attention and MLP of 36 layers; Megatron has one matrix for queries, keys and values, one for gate and up."""
    attention = (4096 + 4096 + 2 * 1024) + (4096 + 4096)
    mlp = (4096 + 2 * 12288) + (12288 + 4096)
    assert num_trained(DENSE, lora(8192)) == 36 * 16 * (attention + mlp)


def test_adapters_of_30b_are_as_many_as_were_counted_on_a_gpu():
    """15.1 million with one pair for a layer's experts, as the bridge's own count was; 128 pairs have their own."""
    attention = (2048 + 4096 + 2 * 512) + (4096 + 2048)
    experts = (2048 + 2 * 768) + (768 + 2048)
    assert num_trained(EXPERTS, lora(8192)) == 48 * 16 * (attention + experts) == 15_138_816
    each = lora(8192, lora_expert_adapters="per_expert")
    assert num_trained(EXPERTS, each) == 48 * 16 * (attention + 128 * experts)


def test_recomputing_keeps_the_inputs_of_layers_and_one_whole_layer():
    arguments = full(8192).model_copy(update={"gradient_checkpointing": True})
    kept = memory(DENSE, arguments, Layout(world=1)).activations
    whole = memory(DENSE, full(8192), Layout(world=1)).activations
    assert kept == pytest.approx(8192 * 36 * 2 * 4096 * 2 + whole / 36, rel=1e-6)


def test_the_layouts_that_fit_come_with_the_least_communication_first():
    plan = make_plan(DENSE, full(8192), backend="megatron", num_gpus=8, gpu_gib=80)
    assert plan.fitting
    assert all(one.total_bytes <= 80 * GIB for one in plan.fitting)
    sizes = [
        one.tensor_model_parallel_size * one.pipeline_model_parallel_size for one in plan.fitting
    ]
    assert sizes == sorted(sizes)


def test_a_layout_that_cannot_be_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"must divide the model's 8 key-value heads"):
        make_plan(
            DENSE,
            full(8192, tensor_model_parallel_size=16),
            backend="megatron",
            num_gpus=16,
            gpu_gib=139,
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"fsdp": "full_shard"}, "--fsdp full_shard is a flag of the hf backend"),
        ({"torch_compile": True}, "--torch_compile is a flag of the hf backend"),
        ({"head": "seq_cls"}, "trains 'yes_no' heads"),
    ],
)
def test_flags_of_the_hf_backend_are_refused_as_in_a_run(given, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(DENSE, TrainArguments(**given), backend="megatron", num_gpus=2, gpu_gib=139)
