"""The arithmetic of each sharding by hand; measured peaks are in tests/benchmarks, real layers in tests/trainer."""

import pytest
from tests.core.test_model_shape import QWEN3_8B

from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.contracts.plan import GIB
from tevatron.core.contracts.train import TrainArguments
from tevatron.core.errors import ConfigError
from tevatron.core.model_shape import ModelShape
from tevatron.core.plan import make_plan
from tevatron.core.plan.hf import memory

DENSE = ModelShape.of(QWEN3_8B)
ENDS = 2 * 151936 * 4096
LAYER = (DENSE.num_params - ENDS) // 36


def bf16(**given: object) -> TrainArguments:
    return TrainArguments(dtype="bfloat16", **given)


def test_states_of_8b_without_sharding_are_those_of_the_paper():
    """The paper: about 128 GiB a rank; fp32 weights, gradients and two moments, and DDP's copies of the gradients."""
    parts = memory(DENSE, bf16(), num_gpus=1)
    output = 4 * 151936 * 4096
    states = parts.weights + parts.gradients - output + parts.optimizer
    assert states == 16 * DENSE.num_params
    assert states / GIB == pytest.approx(128, rel=0.05)
    with_ddp = memory(DENSE, bf16(), num_gpus=8)
    assert with_ddp.gradients - parts.gradients == 4 * DENSE.num_params
    assert not make_plan(DENSE, bf16(), backend="hf", num_gpus=8, gpu_gib=139).asked.fits


@pytest.mark.parametrize(("mode", "layers"), [("shard_grad_op", 36), ("full_shard", 2)])
def test_fsdp_shares_states_and_gathers_weights_in_bf16(mode, layers):
    parts = memory(DENSE, bf16(fsdp=mode), num_gpus=8)
    share = 4 * DENSE.num_params // 8
    assert parts.weights == share + 2 * (ENDS + layers * LAYER)
    assert parts.gradients == share + 2 * 151936 * 4096
    assert parts.optimizer == 2 * share


def test_lora_keeps_weights_in_bf16_and_states_of_adapters_alone():
    parts = memory(DENSE, bf16(use_lora=True), num_gpus=1)
    adapters = 36 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    assert parts.weights == 2 * DENSE.num_params + 4 * adapters
    assert parts.gradients == 4 * adapters
    assert parts.optimizer == 8 * adapters


def test_a_model_with_one_label_has_no_output_layer():
    parts = memory(DENSE, bf16(head="seq_cls"), num_gpus=1)
    assert parts.weights == parts.gradients == 4 * (DENSE.num_params - 151936 * 4096)


def test_padded_passes_are_micro_batches_of_longest_prompts():
    padded = bf16(packing=False, per_device_train_batch_size=2, train_group_size=8)
    packed = bf16(packing_max_tokens=2 * 8 * 512)
    found = [memory(DENSE, one, num_gpus=1).activations for one in (padded, packed)]
    assert found[0] == found[1]


def test_the_shardings_that_fit_come_with_the_least_communication_first():
    arguments = bf16(gradient_checkpointing=True)
    plan = make_plan(DENSE, arguments, backend="hf", num_gpus=8, gpu_gib=139)
    assert (plan.backend, plan.asked.layout, plan.asked.fits) == ("hf", "DP=8 DDP", False)
    assert [(one.layout, one.fsdp) for one in plan.fitting] == [
        ("DP=8 FSDP shard_grad_op", "shard_grad_op"),
        ("DP=8 FSDP full_shard", "full_shard"),
    ]


def test_compiled_layers_are_not_sharded():
    arguments = bf16(torch_compile=True, use_lora=True)
    plan = make_plan(DENSE, arguments, backend="hf", num_gpus=2, gpu_gib=139)
    assert [one.layout for one in plan.fitting] == ["DP=2 DDP"]


@pytest.mark.parametrize(
    ("given", "num_gpus", "message"),
    [
        ({"fsdp": "full_shard"}, 1, "--fsdp full_shard needs at least 2 ranks, got 1"),
        ({"fsdp": "full_shard", "torch_compile": True}, 2, "--torch_compile is not honoured with"),
        (
            {"megatron": MegatronArguments(tensor_model_parallel_size=2)},
            2,
            "megatron: tensor_model_parallel_size is not honoured by the hf backend",
        ),
    ],
)
def test_what_a_run_refuses_has_no_plan(given, num_gpus, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(DENSE, bf16(**given), backend="hf", num_gpus=num_gpus, gpu_gib=139)


def test_an_unknown_backend_is_named():
    with pytest.raises(ConfigError, match=r"unknown backend 'megatorn'.* 'megatron'"):
        make_plan(DENSE, bf16(), backend="megatorn", num_gpus=1, gpu_gib=139)
