"""What the plan says that a layer keeps for its backward pass, beside what autograd keeps of real ones."""

import weakref
from functools import partialmethod

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.model_shape import ModelShape
from tevatron.core.nn import attention
from tevatron.core.nn.attention import ATTENTION, Segments, register
from tevatron.core.nn.compiling import compile_layers
from tevatron.core.plan import hf
from tevatron.trainer.program.lora import add_lora

TOKENS = 61
"""No multiple of any width, so that nothing else has as many rows."""
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 96,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": (LlamaConfig, {}),
    "qwen3": (Qwen3Config, {"head_dim": 64}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
            "intermediate_size": 96,
        },
    ),
}


class FlashKeeps(torch.autograd.Function):
    """Keeps what the kernel for packed rows keeps on a GPU: its inputs, its output and a sum for each head."""

    @staticmethod
    def forward(ctx, query, key, value):
        output = torch.zeros_like(query.transpose(1, 2).contiguous())
        ctx.save_for_backward(query, key, value, output, torch.zeros(query.shape[1:3]))
        return output.transpose(1, 2)

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    monkeypatch.setattr(attention, "_causal", lambda q, k, v, *_: FlashKeeps.apply(q, k, v))
    # The partition that inductor makes, without its code.
    compiled = partialmethod(nn.Module.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(nn.Module, "compile", compiled)
    yield
    register()
    torch.compiler.reset()


def arguments(**values) -> TrainArguments:
    values = {"dtype": "bfloat16", "lora_r": 1, **values}
    return TrainArguments(
        packing_max_tokens=TOKENS, rerank_max_len=TOKENS, train_group_size=2, **values
    ).model_copy(update={"train_group_size": 1})


def shape_and_model(
    kind: str, options: TrainArguments, num_layers: int
) -> tuple[ModelShape, PreTrainedModel]:
    """Build it with weights as the backend has them where a layer runs."""
    torch.manual_seed(0)
    cls, own = CONFIGS[kind]
    config = cls(**{**SIZES, **own}, num_hidden_layers=num_layers)
    model = AutoModelForCausalLM.from_config(config).train()
    register()
    model.set_attn_implementation(options.attn_implementation or ATTENTION)
    if options.use_lora:
        model.to(torch.bfloat16)
        add_lora(model, options)
    if options.fsdp:
        # The mixed precision policy gathers all weights in bf16.
        model.to(torch.bfloat16)
    if options.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if options.torch_compile:
        compile_layers(model)
    return ModelShape.of(config.to_dict()), model


def run(model: PreTrainedModel, options: TrainArguments) -> None:
    # The kernel takes no fp32: prompts are then attended to one after the other.
    segments = Segments.of((30, TOKENS - 30), torch.device("cpu"))
    extra = {"segments": segments} if options.dtype == "float32" and options.packing else {}
    is_cast = options.dtype != "float32"
    with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
        model.base_model(
            input_ids=torch.zeros(1, TOKENS, dtype=torch.long), use_cache=False, **extra
        )


def kept_bytes(model: PreTrainedModel, options: TrainArguments) -> int:
    """Return the bytes that autograd keeps, each storage once and parameters left out."""
    parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run(model, options)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(
    "kind", [pytest.param("llama", marks=pytest.mark.full), "qwen3", "qwen3_moe"]
)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dtype": "float32"},
        {"fsdp": "full_shard"},
        {"fsdp": "full_shard", "gradient_checkpointing": True},
        {"use_lora": True},
        {"use_lora": True, "lora_target_groups": ["attn"]},
        {"use_lora": True, "lora_target_modules": ["q_proj,o_proj"]},
        {"use_lora": True, "fsdp": "full_shard"},
        {"use_lora": True, "gradient_checkpointing": True},
        {"packing": False, "attn_implementation": "eager", "per_device_train_batch_size": 1},
    ],
    ids=str,
)
def test_a_layer_keeps_what_the_plan_says(kind: str, given: dict[str, object]):
    options = arguments(**given)
    kept, planned = [], []
    for num_layers in (2, 3):
        shape, model = shape_and_model(kind, options, num_layers)
        kept.append(kept_bytes(model, options))
        planned.append(hf.memory(shape, options, num_gpus=2).activations)
    assert planned[1] - planned[0] == pytest.approx(kept[1] - kept[0], rel=0.03)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("kind", "given"),
    [("qwen3", {}), pytest.param("llama", {"use_lora": True}, marks=pytest.mark.full)],
)
def test_a_compiled_layer_keeps_what_the_plan_says(kind: str, given: dict[str, object]):
    test_a_layer_keeps_what_the_plan_says(kind, {"torch_compile": True, **given})


def test_autocast_keeps_its_copies_of_weights_to_the_end_of_a_pass_that_is_computed_again():
    """Nothing of a layer but its input is kept then, and the copies are: so that they may be the most that there is."""
    options = arguments(gradient_checkpointing=True)
    shape, model = shape_and_model("qwen3", options, 3)
    made: list[weakref.ref[torch.Tensor]] = []
    alive = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and TOKENS not in output.shape:
                made.append(weakref.ref(output))
            return output

    def count(*_: object) -> None:
        alive.append(
            sum(one.nbytes for ref in made if (one := ref()) is not None and one.ndim == 2)
        )

    model.base_model.norm.register_forward_hook(count)
    with Copies():
        run(model, options)
    inputs = 3 * TOKENS * 4 * shape.hidden
    assert alive == [hf.memory(shape, options, num_gpus=1).activations - inputs]


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("groups", [None, ["attn"], ["moe_experts", "moe_router", "mlp"]], ids=str)
def test_as_many_parameters_are_trained_as_peft_has(kind: str, groups: list[str] | None):
    options = arguments(use_lora=True, lora_target_groups=groups)
    shape, model = shape_and_model(kind, options, 2)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    assert hf.num_trained(shape, options) == trained
