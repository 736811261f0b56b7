"""The model: Megatron-Bridge's provider set up for a layout, with the weights in it, ready to be trained.

Any architecture that the bridge knows goes through here; what is set is what training a reranker needs, whatever the
architecture. It knows nothing of data, losses or optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.models.gpt_provider import default_layer_spec
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import unwrap_model

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.errors import ConfigError
from tevatron.core.nn.loading import DTYPES
from tevatron.trainer.program.backends.megatron.dispatch import gather_tokens
from tevatron.trainer.program.backends.megatron.grouped import with_frozen_experts
from tevatron.trainer.program.backends.megatron.lora import adapt
from tevatron.trainer.program.backends.megatron.parallel import Ranks, has_transformer_engine
from tevatron.trainer.program.backends.megatron.replicas import STATE_METADATA, Replicas
from tevatron.trainer.program.backends.megatron.sharded import ShardedReplicas
from tevatron.trainer.program.backends.megatron.spec import torch_block_spec

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A model in memory, cut for this rank."""

    bridge: Any
    """Translates weights from and to Hugging Face's names."""
    chunks: list[Any]
    """The parts that this rank holds, wrapped for training."""
    replicas: Replicas | ShardedReplicas
    """What a state has of it."""

    @property
    def config(self) -> Any:
        """Megatron's own config of the model."""
        return self.chunks[0].config

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return this rank's parameters that are trained, by name."""
        return {
            name: parameter
            for chunk in self.chunks
            for name, parameter in chunk.named_parameters()
            if parameter.requires_grad
        }

    def train(self, mode: bool) -> None:
        """Turn dropout on or off."""
        for chunk in self.chunks:
            chunk.train(mode)


def load_model(folder: Path, arguments: TrainArguments, ranks: Ranks) -> MegatronModel:
    """Load a Hugging Face folder's weights into a model of this layout and make it trainable."""
    try:
        bridge = AutoBridge.from_hf_pretrained(str(folder), trust_remote_code=False)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"Megatron-Bridge cannot load {folder}: {reason} The hf backend may"
        ) from error
    return build_model(bridge, arguments, ranks, load_weights=True)


def build_model(
    bridge: Any, arguments: TrainArguments, ranks: Ranks, *, load_weights: bool
) -> MegatronModel:
    """Build the model of a bridge; without weights its numbers are random, or a state is loaded later."""
    provider = bridge.to_megatron_provider(load_weights=load_weights)
    configure(provider, arguments, ranks)
    provider.register_pre_wrap_hook(_trainable_part(arguments, ranks))
    provider.finalize()
    chunks = provider.provide_distributed_model(
        wrap_with_ddp=False,
        use_cpu_initialization=ranks.device.type == "cpu",
        mixed_precision_wrapper=Float16Module,
    )
    if not provider.moe_permute_fusion:
        for chunk in chunks:
            gather_tokens(chunk)
    ddp = _ddp_config(arguments, ranks)
    if ddp.use_megatron_fsdp:
        (chunk,) = chunks
        state = unwrap_model(chunk).sharded_state_dict(metadata=STATE_METADATA)
        sharded = ShardedReplicas(chunk, provider, ddp, state=state)
        total = sum(one.numel() for one in sharded.chunk.parameters())
        logger.info("%d of %d parameters are on this rank between passes", sharded.num_held, total)
        return MegatronModel(bridge=bridge, chunks=[sharded.chunk], replicas=sharded)
    wrapped = [
        DistributedDataParallel(config=provider, ddp_config=ddp, module=one) for one in chunks
    ]
    # Copies of a parameter begin alike on all replicas: adapters are drawn on each rank by itself.
    for chunk in wrapped:
        chunk.broadcast_params()
        if ranks.layout.tensor == 1:
            _accumulate_in_products(chunk)
    replicas = Replicas(wrapped, is_lora=arguments.use_lora)
    model = MegatronModel(bridge=bridge, chunks=wrapped, replicas=replicas)
    _report(model, ranks)
    return model


def configure(provider: Any, arguments: TrainArguments, ranks: Ranks) -> None:
    """Set what depends on layout, numbers and device."""
    own = arguments.megatron
    layout = ranks.layout
    dtype = DTYPES[arguments.dtype]
    provider.tensor_model_parallel_size = layout.tensor
    provider.pipeline_model_parallel_size = layout.pipeline
    provider.context_parallel_size = layout.context
    provider.expert_model_parallel_size = layout.expert
    provider.expert_tensor_parallel_size = 1
    is_moe = bool(provider.num_moe_experts)
    # Megatron's experts need it where matrices are cut.
    provider.sequence_parallel = layout.tensor > 1 and (own.sequence_parallel or is_moe)
    provider.params_dtype = provider.pipeline_dtype = provider.autocast_dtype = dtype
    provider.bf16 = dtype is torch.bfloat16
    provider.fp16 = dtype is torch.float16
    # A packed row is as long as its prompts; so is each stage's message to the next.
    provider.variable_seq_lengths = True
    # The one dispatcher that Megatron takes with rows of any length, for dense models too.
    provider.moe_token_dispatcher_type = "alltoall"
    provider.should_pad_vocab = True
    provider.gradient_accumulation_fusion = False
    provider.hidden_dropout = provider.attention_dropout = 0.0
    provider.calculate_per_token_loss = False
    provider.cross_entropy_loss_fusion = False
    if is_moe:
        provider.moe_grouped_gemm = own.moe_grouped_gemm
        provider.moe_shared_expert_overlap = False
        provider.moe_router_load_balancing_type = own.moe_router_load_balancing_type
        provider.moe_aux_loss_coeff = own.moe_aux_loss_coeff
        provider.moe_z_loss_coeff = own.moe_z_loss_coeff
    if arguments.gradient_checkpointing:
        provider.recompute_granularity = own.recompute_granularity
        if own.recompute_granularity == "full":
            provider.recompute_method = own.recompute_method
            provider.recompute_num_layers = own.recompute_num_layers
    provider.moe_permute_fusion = own.moe_permute_fusion
    has_fused = has_transformer_engine() and ranks.device.type == "cuda"
    _choose_kernels(provider, has_fused=has_fused)
    if is_moe and has_fused and own.moe_grouped_gemm and arguments.use_lora:
        provider.transformer_layer_spec = with_frozen_experts(provider.transformer_layer_spec)


def _choose_kernels(provider: Any, *, has_fused: bool) -> None:
    for fusion in ("bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion"):
        # Unfused, packed rotary embeddings loop over the prompts in Python: five times the step's time.
        setattr(provider, fusion, has_fused)
    if has_fused:
        return
    provider.masked_softmax_fusion = provider.persist_layer_norm = False
    provider.moe_permute_fusion = False
    if provider.transformer_layer_spec is not default_layer_spec and not _is_standard(provider):
        raise ConfigError(
            f"this model's layers ({type(provider).__name__}) need Transformer Engine, which is not installed"
        )
    provider.transformer_layer_spec = torch_block_spec


def _is_standard(provider: Any) -> bool:
    """Say whether the model is made of plain attention and MLP or experts in every layer."""
    frequency = provider.moe_layer_freq
    return type(provider).__name__ == "GPTModelProvider" and frequency in (1, None)


def _accumulate_in_products(chunk: Any) -> None:
    """Have Transformer Engine's layers add to a gradient within the product that makes it, not after it.

    Megatron's own setting for it asks for Apex too, for layers that it has beside them. With matrices that are cut it
    was no faster.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def _trainable_part(arguments: TrainArguments, ranks: Ranks) -> Callable[[list[Any]], list[Any]]:
    def hook(chunks: list[Any]) -> list[Any]:
        if arguments.use_lora:
            adapt(chunks, arguments, ranks)
        elif arguments.megatron.freeze_router:
            for chunk in chunks:
                for name, parameter in chunk.named_parameters():
                    if ".router." in name:
                        parameter.requires_grad_(False)
        return chunks

    return hook


def _ddp_config(arguments: TrainArguments, ranks: Ranks) -> DistributedDataParallelConfig:
    own = arguments.megatron
    on_gpu = ranks.device.type == "cuda"
    return DistributedDataParallelConfig(
        use_distributed_optimizer=own.use_distributed_optimizer,
        use_megatron_fsdp=own.use_megatron_fsdp,
        data_parallel_sharding_strategy=own.data_parallel_sharding_strategy,
        megatron_fsdp_main_grads_dtype=torch.float32,
        # Megatron-FSDP asks for both, and is wrong without them where it cuts the optimizer alone.
        overlap_param_gather=own.use_megatron_fsdp,
        overlap_grad_reduce=own.use_megatron_fsdp or (on_gpu and ranks.layout.data > 1),
        grad_reduce_in_fp32=True,
        check_for_nan_in_grad=False,
        # gloo, of tests on the CPU, has sums alone.
        average_in_collective=on_gpu and not own.use_megatron_fsdp,
    )


def _report(model: MegatronModel, ranks: Ranks) -> None:
    count = sum(parameter.numel() for parameter in model.trainable().values())
    total = sum(one.numel() for chunk in model.chunks for one in chunk.parameters())
    if int(ranks.sums([float(count)])[0]) == 0:
        raise ConfigError("nothing to train: no parameter of the model is trainable")
    logger.info("%d of %d parameters on this rank are trained", count, total)
