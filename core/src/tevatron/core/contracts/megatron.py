"""Flags of the megatron backend alone, with the reference's names. Knows no Megatron."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from tevatron.core.errors import ConfigError
from tevatron.core.layout import Layout
from tevatron.core.model_shape import ModelShape


class MegatronArguments(BaseModel):
    """How a model is cut over ranks, and what only Megatron has."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    # The layout
    tensor_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: int = Field(default=1, ge=1)
    """Stages that the layers are divided into."""
    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each prompt's tokens, for prompts too long for one; packed prompts only."""
    expert_model_parallel_size: int = Field(default=1, ge=1)
    """Ranks that the experts of a layer are spread over."""
    sequence_parallel: bool = True
    """Cut norms and residuals along the tokens where tensor_model_parallel_size is above 1."""
    use_distributed_optimizer: bool = True
    """Shard the optimizer's state over the replicas (ZeRO-1)."""
    use_megatron_fsdp: bool = False
    """Shard more than that over the replicas, by Megatron-FSDP; dense models, full fine-tuning."""
    data_parallel_sharding_strategy: Literal["optim", "optim_grads", "optim_grads_params"] = (
        "optim_grads_params"
    )
    """With use_megatron_fsdp: the optimizer's state alone, its gradients too (ZeRO-2), or the weights too (ZeRO-3)."""

    # Memory
    recompute_granularity: Literal["full", "selective"] = "full"
    """What gradient_checkpointing recomputes: whole layers, or the attention's core alone."""
    recompute_method: Literal["uniform", "block"] = "uniform"
    """With `full`: every group of recompute_num_layers layers, or the first that many of a stage."""
    recompute_num_layers: int = Field(default=1, ge=1)
    """Layers in a group, or in a stage."""

    # Saving
    export_steps: int = Field(default=0, ge=0)
    """Publish a checkpoint every this many steps on the way too, as exports/step-N; 0 for the end alone."""

    # Mixture of experts
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"
    """Loss that keeps the experts evenly used."""
    moe_aux_loss_coeff: float = Field(default=1e-6, ge=0)
    """Its weight."""
    moe_z_loss_coeff: float | None = Field(default=None, ge=0)
    """Weight of the loss that keeps the router's logits small."""
    moe_grouped_gemm: bool = True
    """Compute a layer's experts as one grouped product; off computes them one after the other."""
    moe_permute_fusion: bool = False
    """Fuse the sorting of tokens by expert; needs a Triton that the installed Transformer Engine agrees with."""
    freeze_router: bool = False
    """Leave the routers as they are in full fine-tuning; LoRA never touches them unless asked to."""
    lora_expert_adapters: Literal["shared", "per_expert"] = "shared"
    """With grouped experts: one adapter pair for all experts of a layer, or one for each; others have one each."""

    def layout(self, world: int) -> Layout:
        """Return the layout on that many ranks; it is not checked yet."""
        return Layout(
            world=world,
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_model_parallel_size,
        )

    def check(self, layout: Layout, shape: ModelShape) -> None:
        """Raise `ConfigError` with the numbers unless this model can be cut that way."""
        layout.check(shape)
        if self.use_megatron_fsdp and layout.pipeline > 1:
            raise ConfigError(
                f"use_megatron_fsdp needs pipeline_model_parallel_size 1, got {layout.pipeline}: "
                "its device mesh has no stages"
            )
        if self.use_megatron_fsdp and shape.num_experts:
            raise ConfigError(
                f"use_megatron_fsdp is for dense models, this one has {shape.num_experts} experts a layer: "
                "use expert_model_parallel_size"
            )
