"""Memory of the hf backend on each GPU: alone, with DDP, or with FSDP in either of its modes.

What a layer keeps for its backward pass is added up as autograd keeps it (a test counts it in real layers), with the
sizes that autocast or FSDP's mixed precision give each part; the rest is the constant that both backends have.
"""

from __future__ import annotations

from dataclasses import dataclass

from tevatron.core.contracts.plan import MemoryParts, Plan, PlannedLayout
from tevatron.core.contracts.train import Head, TrainArguments, check_hf
from tevatron.core.model_shape import ModelShape
from tevatron.core.plan.shared import (
    BYTES,
    LORA_DENSE,
    LORA_MOE,
    WORKING_BYTES,
    tokens_per_pass,
)

_LINEARS = {
    "attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
_GATHERED_LAYERS = 2
"""Under full_shard: the layer at work, and the next one on its way."""


def plan(shape: ModelShape, arguments: TrainArguments, *, num_gpus: int, gpu_bytes: int) -> Plan:
    """Return the memory of the sharding asked for and those that fit; an impossible one is a `ConfigError`."""
    check_hf(arguments, num_ranks=num_gpus)
    planned = [
        _planned(shape, one, num_gpus=num_gpus, gpu_bytes=gpu_bytes)
        for one in candidates(arguments, num_gpus=num_gpus)
    ]
    return Plan(
        backend="hf",
        num_params=num_params(shape, arguments),
        num_trained=num_trained(shape, arguments),
        tokens_per_pass=tokens_per_pass(arguments),
        gpu_bytes=gpu_bytes,
        asked=_planned(shape, arguments, num_gpus=num_gpus, gpu_bytes=gpu_bytes),
        fitting=[one for one in planned if one.fits],
    )


def candidates(arguments: TrainArguments, *, num_gpus: int) -> list[TrainArguments]:
    """Return the arguments with each sharding that there can be, those that send the least first."""
    # FSDP needs a second GPU and layers that are not compiled.
    can_shard = num_gpus > 1 and not arguments.torch_compile
    modes = ("", "shard_grad_op", "full_shard") if can_shard else ("",)
    return [arguments.model_copy(update={"fsdp": mode}) for mode in modes]


def memory(shape: ModelShape, arguments: TrainArguments, *, num_gpus: int) -> MemoryParts:
    """Return the parts of each GPU when a backward pass begins and earlier ones have left their gradients."""
    sizes = _Sizes.of(arguments)
    params, trained = num_params(shape, arguments), num_trained(shape, arguments)
    adapters = trained if arguments.use_lora else 0
    share = num_gpus if arguments.fsdp else 1
    copies = 2 if num_gpus > 1 and not arguments.fsdp else 1
    gathered = sizes.work * _gathered(shape, arguments) if arguments.fsdp else 0
    # Two rows of the output layer are used, and the gradient is of all.
    output = 0
    if not arguments.use_lora and arguments.head is Head.YES_NO:
        output = (sizes.work if arguments.fsdp else sizes.stored) * shape.embedding_params
    return MemoryParts(
        weights=round((sizes.stored * params + 4 * adapters) / share + gathered),
        gradients=round(4 * copies * trained / share + output),
        optimizer=round(8 * trained / share),
        activations=_activations(shape, arguments, sizes),
        working=WORKING_BYTES,
    )


def num_params(shape: ModelShape, arguments: TrainArguments) -> int:
    """Return the number of weights; a model with the one-label head has no output layer."""
    return shape.num_layers * _layer_params(shape) + _ends(shape, arguments)


def num_trained(shape: ModelShape, arguments: TrainArguments) -> int:
    """Return the number of trained parameters, of LoRA as PEFT makes them: a pair for each matrix."""
    if not arguments.use_lora:
        return num_params(shape, arguments)
    hidden, ffn, shared = shape.hidden, shape.ffn, shape.shared_ffn
    query, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    sizes = {
        "q_proj": hidden + query,
        "k_proj": hidden + keys,
        "v_proj": hidden + keys,
        "o_proj": query + hidden,
        **dict.fromkeys(_LINEARS["mlp"], 0 if shape.num_experts else hidden + ffn),
        # Gate and up are one matrix, of all experts.
        "moe_experts": shape.num_experts * (2 * hidden + 3 * ffn),
        "moe_shared": 3 * (hidden + shared) if shared else 0,
        "moe_router": hidden + shape.num_experts if shape.num_experts else 0,
    }
    adapted = _adapted(shape, arguments)
    a_layer = sum(size for name, size in sizes.items() if name in adapted)
    return shape.num_layers * arguments.lora_r * a_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    """Bytes of a number, by where it is."""

    stored: int
    """A weight of the model."""
    work: int
    """What products take and give."""
    stream: int
    """What layers hand on to one another."""
    casts: bool
    """Whether autocast makes a copy of the input, and of an fp32 weight, for each product."""

    @classmethod
    def of(cls, arguments: TrainArguments) -> _Sizes:
        work = BYTES[arguments.dtype]
        # Masters are the weights; frozen ones need no more than the arithmetic's precision.
        stored = work if arguments.use_lora and arguments.dtype != "float16" else 4
        is_sharded = bool(arguments.fsdp)
        return cls(
            stored=stored,
            work=work,
            stream=work if is_sharded else stored,
            casts=work < 4 and not is_sharded,
        )


def _planned(
    shape: ModelShape, arguments: TrainArguments, *, num_gpus: int, gpu_bytes: int
) -> PlannedLayout:
    parts = memory(shape, arguments, num_gpus=num_gpus)
    sharding = f" FSDP {arguments.fsdp}" if arguments.fsdp else " DDP" if num_gpus > 1 else ""
    queries = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    return PlannedLayout(
        layout=f"DP={num_gpus}{sharding}",
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=1,
        data_parallel_size=num_gpus,
        fsdp=arguments.fsdp,
        queries_per_step=queries * num_gpus,
        memory=parts,
        total_bytes=parts.total,
        fits=parts.total <= gpu_bytes,
    )


def _layer_params(shape: ModelShape) -> int:
    experts = shape.expert_params * max(1, shape.num_experts)
    return shape.attention_params + experts + shape.shared_params


def _ends(shape: ModelShape, arguments: TrainArguments) -> int:
    is_one = shape.is_tied or arguments.head is Head.SEQ_CLS
    return shape.embedding_params * (1 if is_one else 2)


def _gathered(shape: ModelShape, arguments: TrainArguments) -> int:
    """Return the whole weights at the peak: both ends of the model, and the layers of the mode."""
    layers = shape.num_layers
    if arguments.fsdp == "full_shard":
        layers = min(layers, _GATHERED_LAYERS)
    return _ends(shape, arguments) + layers * _layer_params(shape)


def _adapted(shape: ModelShape, arguments: TrainArguments) -> set[str]:
    """Return what LoRA adapts: linear modules of a layer by their names, groups of experts by theirs."""
    groups = arguments.lora_target_groups
    if not groups and arguments.lora_target_modules:
        parts = ",".join(arguments.lora_target_modules).split(",")
        return {name.strip() for name in parts}
    groups = groups or list(LORA_MOE if shape.num_experts else LORA_DENSE)
    return {name for group in groups for name in _LINEARS.get(group, (group,))}


def _activations(shape: ModelShape, arguments: TrainArguments, sizes: _Sizes) -> int:
    """Return the bytes kept for the backward pass, where layers are computed again those of the fullest moment."""
    tokens, layers = tokens_per_pass(arguments), shape.num_layers
    # Stacked experts are no linear modules, which autocast knows.
    linear = shape.attention_params + shape.shared_params
    linear += 0 if shape.num_experts else shape.expert_params
    copies = sizes.work * linear if sizes.casts and sizes.stored > sizes.work else 0
    whole = tokens * layer_bytes(shape, arguments) + copies
    if arguments.use_lora and "moe_experts" in _adapted(shape, arguments):
        # PEFT adds the adapters to the experts' weights, and the product keeps the sum.
        whole += sizes.stream * shape.num_experts * shape.expert_params
    if not arguments.gradient_checkpointing:
        return layers * whole
    # Autocast keeps its copies of trained weights to the end of the forward pass.
    forward = 0 if arguments.use_lora else layers * copies
    return layers * tokens * sizes.stream * shape.hidden + max(whole, forward)


def layer_bytes(shape: ModelShape, arguments: TrainArguments) -> int:
    """Return what one layer keeps for each token; a few numbers a head, below a hundredth, are left out."""
    sizes = _Sizes.of(arguments)
    adapted = _adapted(shape, arguments) if arguments.use_lora else None
    attended = _attended(shape, arguments, sizes)
    heads = shape.head_size * (shape.num_heads + shape.num_kv_heads)
    if arguments.torch_compile and not shape.num_experts:
        # What is cheap is computed again: products' results and the stream are left.
        products = 3 * (shape.hidden + shape.ffn) + shape.norms_heads * heads
        return attended + sizes.work * products + sizes.stream * shape.hidden
    # A norm keeps its input in fp32, and where its own weights are trained what they are multiplied with.
    is_trained = adapted is None
    norms = 2 * (4 + is_trained * sizes.stream) * shape.hidden
    norms += shape.norms_heads * (4 + is_trained * sizes.work) * heads
    inputs = sizes.work * shape.hidden * _num_inputs(shape, adapted, casts=sizes.casts)
    return norms + inputs + attended + _mlp(shape, adapted, sizes)


def _attended(shape: ModelShape, arguments: TrainArguments, sizes: _Sizes) -> int:
    """Return the bytes of queries, keys, values and the attention's output, each as often as it is there."""
    query, keys = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    kept = 2 * sizes.work * (query + keys)
    if arguments.use_lora and sizes.casts and "o_proj" in _adapted(shape, arguments):
        kept += sizes.work * query
    if sizes.work == 4 and arguments.packing:
        # The kernel for packed rows takes no fp32: each prompt has an output of its own.
        kept += sizes.work * query
    if arguments.attn_implementation == "eager":
        kept += _eager_scores(shape, arguments, sizes)
    return kept


def _eager_scores(shape: ModelShape, arguments: TrainArguments, sizes: _Sizes) -> int:
    """Return the bytes of a token's scores with its row, and of keys and values repeated for each head."""
    scores = shape.num_heads * arguments.rerank_max_len
    repeated = 2 * shape.head_size * (shape.num_heads - shape.num_kv_heads)
    return scores * (4 + (sizes.work if sizes.work < 4 else 0)) + sizes.work * repeated


def _mlp(shape: ModelShape, adapted: set[str] | None, sizes: _Sizes) -> int:
    """Return the bytes of gate, its activation and up, and of what products take whose weights get a gradient."""
    if not shape.num_experts:
        takes = adapted is None or "down_proj" in adapted
        return sizes.work * shape.ffn * (3 + takes)
    takes = adapted is None or "moe_experts" in adapted
    routed = (1 + takes) * shape.hidden + (3 + takes) * shape.ffn
    return sizes.stream * shape.experts_per_token * routed + 4 * sizes.work * shape.shared_ffn


def _num_inputs(shape: ModelShape, adapted: set[str] | None, *, casts: bool) -> int:
    """Return how often normed hidden states are kept: once where products share them, else for each product."""
    # Beside a router, experts take rows of their own.
    mlp = ("moe_router",) if shape.num_experts else _LINEARS["mlp"][:2]
    found = 0
    for names in (_LINEARS["attn"][:3], mlp):
        taking = len(names) if adapted is None else len(adapted.intersection(names))
        found += taking if casts else min(taking, 1)
    return found
