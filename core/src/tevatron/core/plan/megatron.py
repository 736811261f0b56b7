"""Memory of the megatron backend on each GPU of a layout.

Weights, gradients and optimizer are counted; activations are what Megatron keeps with fused attention for each token and
layer; the rest is a constant, measured on Qwen3-8B and Qwen3-30B-A3B (docs/plan.md says how close it comes).
"""

from __future__ import annotations

from collections.abc import Iterator

from tevatron.core.contracts.plan import MemoryParts, Plan, PlannedLayout
from tevatron.core.contracts.train import TrainArguments, check_megatron
from tevatron.core.errors import ConfigError
from tevatron.core.layout import Layout
from tevatron.core.model_shape import ModelShape
from tevatron.core.plan.shared import (
    BYTES,
    LORA_DENSE,
    LORA_MOE,
    WORKING_BYTES,
    tokens_per_pass,
)

_MAX_TENSOR = 8
"""More ranks than a node has would send each layer's sums over the slower network."""


def plan(shape: ModelShape, arguments: TrainArguments, *, num_gpus: int, gpu_bytes: int) -> Plan:
    """Return the memory of the layout asked for and the layouts that fit; an impossible one is a `ConfigError`."""
    check_megatron(arguments)
    asked = arguments.megatron.layout(num_gpus)
    arguments.megatron.check(asked, shape)
    planned = [
        _planned(shape, arguments, layout, gpu_bytes)
        for layout in candidates(shape, num_gpus)
        if layout.pipeline == 1 or not arguments.megatron.use_megatron_fsdp
    ]
    return Plan(
        backend="megatron",
        num_params=shape.num_params,
        num_trained=num_trained(shape, arguments),
        tokens_per_pass=tokens_per_pass(arguments),
        gpu_bytes=gpu_bytes,
        asked=_planned(shape, arguments, asked, gpu_bytes),
        fitting=[one for one in planned if one.fits],
    )


def candidates(shape: ModelShape, num_gpus: int) -> list[Layout]:
    """Return the layouts that the model can be cut into, those that send the least first."""
    found = []
    for tensor in (1, 2, 4, _MAX_TENSOR):
        for pipeline in _powers_of_two(num_gpus):
            for expert in _powers_of_two(max(1, shape.num_experts)):
                layout = Layout(world=num_gpus, tensor=tensor, pipeline=pipeline, expert=expert)
                try:
                    layout.check(shape)
                except ConfigError:
                    continue
                found.append(layout)
    return sorted(found, key=lambda one: (one.tensor * one.pipeline, one.pipeline, one.expert))


def memory(shape: ModelShape, arguments: TrainArguments, layout: Layout) -> MemoryParts:
    """Return the parts of the fullest GPU."""
    size = BYTES[arguments.dtype]
    dense, experts = _held(shape, layout)
    if arguments.use_lora:
        trained_dense, trained_experts = _lora(shape, arguments, layout)
    else:
        trained_dense, trained_experts = dense, experts
    sharded = arguments.megatron.use_distributed_optimizer
    # With fp32 weights the masters are the weights themselves.
    state = 8 if size == 4 else 12
    optimizer = state * (
        trained_dense / (layout.data * layout.context if sharded else 1)
        + trained_experts / (layout.expert_data if sharded else 1)
    )
    adapters = trained_dense + trained_experts if arguments.use_lora else 0
    weights, gradients = dense + experts + adapters, trained_dense + trained_experts
    if arguments.megatron.use_megatron_fsdp:
        weights, gradients = _sharded(shape, arguments, layout)
    return MemoryParts(
        weights=round(size * weights),
        gradients=round(4 * gradients),
        optimizer=round(optimizer),
        activations=round(size * _activations(shape, arguments, layout)),
        working=WORKING_BYTES,
    )


def num_trained(shape: ModelShape, arguments: TrainArguments) -> int:
    """Return the number of trained parameters of the whole model."""
    if not arguments.use_lora:
        return shape.num_params
    return round(sum(_lora(shape, arguments, Layout(world=1))))


def _planned(
    shape: ModelShape, arguments: TrainArguments, layout: Layout, gpu_bytes: int
) -> PlannedLayout:
    parts = memory(shape, arguments, layout)
    queries = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    own = arguments.megatron
    sharding = f" FSDP {own.data_parallel_sharding_strategy}" if own.use_megatron_fsdp else ""
    return PlannedLayout(
        layout=f"{layout}{sharding}",
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        data_parallel_size=layout.data,
        queries_per_step=queries * layout.data,
        memory=parts,
        total_bytes=parts.total,
        fits=parts.total <= gpu_bytes,
    )


def _held(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Return the parameters on the fullest GPU: those that the tensor ranks share, and the experts."""
    layers = shape.num_layers / layout.pipeline
    dense = shape.attention_params + shape.shared_params
    experts = 0.0
    if shape.num_experts:
        experts = layers * shape.expert_params * shape.num_experts / layout.expert
    else:
        dense += shape.expert_params
    # A single stage holds both ends; else the first has the embedding, the last the output layer or a tied copy.
    ends = 1 if shape.is_tied or layout.pipeline > 1 else 2
    return (layers * dense + ends * shape.embedding_params) / layout.tensor, experts


def _sharded(shape: ModelShape, arguments: TrainArguments, layout: Layout) -> tuple[float, float]:
    """Return the weights and gradients of a dense model on a GPU under Megatron-FSDP: its share, and what is whole besides."""
    whole, _ = _held(shape, layout)
    share = whole / (layout.data * layout.context)
    ends = (1 if shape.is_tied else 2) * shape.embedding_params / layout.tensor
    # The layer at work and the next one are gathered; embedding and output layer stay so.
    layers = 2 * (whole - ends) / shape.num_layers
    # On their way to the sum: two layers, or the output layer's, though two of its rows are used.
    summed = max(layers, shape.embedding_params / layout.tensor)
    match arguments.megatron.data_parallel_sharding_strategy:
        case "optim":
            return whole, whole
        case "optim_grads":
            return whole, share + summed
        case "optim_grads_params":
            return share + layers + ends, share + summed


def _lora(shape: ModelShape, arguments: TrainArguments, layout: Layout) -> tuple[float, float]:
    """Return the adapters' parameters on a GPU: of what the tensor ranks share, and of the experts."""
    chosen = arguments.lora_target_groups or (LORA_MOE if shape.num_experts else LORA_DENSE)
    query, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    layers = shape.num_layers / layout.pipeline
    dense = 0
    if "attn" in chosen:
        dense += (shape.hidden + query + 2 * keys) + (query + shape.hidden)
    if "mlp" in chosen and not shape.num_experts:
        dense += 2 * shape.hidden + 3 * shape.ffn
    if "moe_shared" in chosen:
        dense += 2 * shape.hidden + 3 * shape.shared_ffn if shape.shared_ffn else 0
    if "moe_router" in chosen:
        dense += shape.hidden + shape.num_experts
    # Gate and up are one matrix, as queries, keys and values are, with one pair.
    experts = 2 * shape.hidden + 3 * shape.ffn if "moe_experts" in chosen else 0
    own = arguments.megatron
    if own.lora_expert_adapters == "per_expert" or not own.moe_grouped_gemm:
        experts *= shape.num_experts // layout.expert
    rank = arguments.lora_r
    return rank * layers * dense / layout.tensor, float(rank * layers * experts)


def _activations(shape: ModelShape, arguments: TrainArguments, layout: Layout) -> float:
    """Return the numbers kept for the backward pass, of as many passes as a stage has in flight."""
    own = arguments.megatron
    tokens = tokens_per_pass(arguments) / layout.context
    layers = shape.num_layers / layout.pipeline
    is_cut = own.sequence_parallel or shape.num_experts > 0
    shared = layout.tensor if is_cut else 1
    whole = _whole_layer(shape) / layout.tensor + 4 * shape.hidden * (
        1 / shared - 1 / layout.tensor
    )
    if not arguments.gradient_checkpointing or own.recompute_granularity == "selective":
        kept = layers * whole
    else:
        inputs = 2 * shape.hidden / shared
        if own.recompute_method == "uniform":
            kept = layers / own.recompute_num_layers * inputs + own.recompute_num_layers * whole
        else:
            again = min(layers, own.recompute_num_layers)
            kept = again * inputs + (layers - again) * whole + (whole if again else 0)
    return tokens * kept * layout.pipeline


def _whole_layer(shape: ModelShape) -> float:
    """Return the numbers that one layer keeps for each token: inputs and outputs of norms, attention and MLP."""
    query, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    attention = 4 * shape.hidden + (query + 2 * keys) + query
    if shape.norms_heads:
        attention += query + keys
    if not shape.num_experts:
        return attention + 3 * shape.ffn
    routed = shape.experts_per_token * (shape.hidden + 3 * shape.ffn)
    return attention + routed + 2 * shape.hidden + 3 * shape.shared_ffn


def _powers_of_two(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
