"""Experts grouped into one layer on torch's own products: where Transformer Engine is absent, and where they are frozen.

A layer's experts on a rank are `experts.linear_fc1.weight0, weight1, ...` as with Transformer Engine, so that weights,
adapters and states have the same names and kinds on every machine. Frozen experts are one product: Transformer
Engine's layer goes through its experts in Python, which took half of a LoRA step on 128 of them.

Shapes: T tokens sorted by expert, E experts of this rank, I input size, O output size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from tevatron.core.errors import ConfigError


def grouped_experts(moe_layer: Any) -> Any:
    """Return the builder of a mixture's layer with its experts grouped, all else as it was."""
    experts = partial(
        TEGroupedMLP, submodules=GroupedMLPSubmodules(TorchGroupedColumn, TorchGroupedRow)
    )
    submodules = replace(moe_layer.keywords["submodules"], experts=experts)
    return partial(moe_layer.func, submodules=submodules)


def with_frozen_experts(layer_spec: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the provider's spec of its layers with the experts of each grouped here, all else as it was."""

    def spec(provider: Any) -> Any:
        made = layer_spec(provider)
        # Some architectures list their layers, or have a mixture in some layers only.
        layers = getattr(made, "layer_specs", None) or [made]
        for layer in layers:
            mlp = layer.submodules.mlp
            if isinstance(mlp, partial) and mlp.func is MoELayer:
                layer.submodules.mlp = grouped_experts(mlp)
        return made

    return spec


class TorchGrouped(nn.Module):
    """One matrix for each expert of this rank; experts are never cut, so it needs no tensor parallelism."""

    partition_dim: int
    # The parents' keep a place for the state of 8-bit products, which no checkpoint of this has.
    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        /,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        pg_collection: Any,
        **_: object,
    ) -> None:
        # Not the parents': they hold one matrix, and are parents only because adapters look for these types.
        nn.Module.__init__(self)
        if bias or config.expert_tensor_parallel_size != 1:
            raise ConfigError(
                f"grouped experts without Transformer Engine have no bias and are not cut; got bias {bias} and "
                f"expert_tensor_parallel_size {config.expert_tensor_parallel_size}"
            )
        self.config = config
        self.num_gemms = num_gemms
        self.input_size, self.output_size = input_size, output_size
        self._groups = pg_collection
        self._stack: Tensor | None = None
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        for index in range(num_gemms):
            weight = nn.Parameter(
                torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
            )
            if config.perform_initialization:
                init_method(weight)
            # Megatron adds such a gradient up over the ranks that hold the same experts: with whole experts these are
            # others than the ranks that hold the same dense layers, as soon as either is divided.
            vars(weight)["allreduce"] = (
                config.expert_model_parallel_size == 1 and config.tensor_model_parallel_size == 1
            )
            set_tensor_model_parallel_attributes(weight, True, self.partition_dim, 1)
            self.register_parameter(f"weight{index}", weight)

    @property
    def weights(self) -> list[nn.Parameter]:
        """The experts' matrices, [O, I] each."""
        return [self.get_parameter(f"weight{index}") for index in range(self.num_gemms)]

    def forward(self, tokens_TI: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        """Multiply each expert's tokens with its matrix; returns [T, O] and no bias."""
        if self.is_one_product(tokens_TI):
            ends_E = ends_of(tokens_per_expert, tokens_TI.device)
            found: Tensor = _FrozenProduct.apply(tokens_TI, self.stacked(), ends_E)  # type: ignore[no-untyped-call]
            return found, None
        parts = torch.split(tokens_TI, tokens_per_expert)
        # An expert without tokens takes part too: its gradient is zero, not missing.
        return torch.cat([F.linear(*pair) for pair in zip(parts, self.weights, strict=True)]), None

    def is_one_product(self, tokens_TI: Tensor) -> bool:
        """Say whether the experts are frozen and torch has a kernel for all of them at once."""
        is_frozen = not self.weight0.requires_grad
        return is_frozen and tokens_TI.dtype is torch.bfloat16 and len(tokens_TI) > 0

    def stacked(self) -> Tensor:
        """Return the matrices as one, [E, O, I], of which each is a view; puts them together where they are not."""
        weights, stacked = self.weights, self._stack
        size = weights[0].nbytes
        if stacked is None or any(
            weight.data_ptr() != stacked.data_ptr() + index * size
            for index, weight in enumerate(weights)
        ):
            stacked = self._stack = torch.stack([weight.data for weight in weights])
            for weight, part in zip(weights, stacked, strict=True):
                weight.data = part
        return stacked

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return each expert's matrix as a part of the one of all experts, as Megatron's other experts do."""
        first = self._groups.ep.rank() * self.num_gemms
        number = self._groups.ep.size() * self.num_gemms
        found = {}
        for index, weight in enumerate(self.weights):
            (sharded,) = make_sharded_tensors_for_checkpoint(
                {"weight": weight},
                prefix,
                {"weight": self.partition_dim},
                (*sharded_offsets, (len(sharded_offsets), first + index, number)),
                tp_group=self._groups.expt_tp,
                dp_cp_group=(metadata or {})["dp_cp_group"],
            ).values()
            sharded.replica_id = (*sharded.replica_id[:2], self._groups.expt_dp.rank())
            found[f"{prefix}weight{index}"] = sharded
        return found

    def backward_dw(self) -> None:
        """Do nothing: gradients are not delayed here."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_gemms} x [{self.output_size}, {self.input_size}])"


def ends_of(tokens_per_expert: list[int], device: torch.device) -> Tensor:
    """Return where each expert's tokens end, [E]."""
    ends_E = torch.tensor(tokens_per_expert, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends_E.to(device, non_blocking=True)


class _FrozenProduct(torch.autograd.Function):
    """Each expert's tokens with its matrix, in one kernel; only the tokens get a gradient."""

    @staticmethod
    def forward(ctx: Any, tokens_TI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(weight_EOI, ends_E)
        return F.grouped_mm(tokens_TI, weight_EOI.transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        weight_EOI, ends_E = ctx.saved_tensors
        return F.grouped_mm(grads[0].contiguous(), weight_EOI, offs=ends_E), None, None


class TorchGroupedColumn(TorchGrouped, ColumnParallelLinear):  # type: ignore[misc]
    """The experts' first layer."""

    partition_dim = 0


class TorchGroupedRow(TorchGrouped, RowParallelLinear):  # type: ignore[misc]
    """The experts' second layer."""

    partition_dim = 1


# The bridge goes by the names of classes.
AutoMapping.register_module_type("TorchGroupedColumn", "column")
AutoMapping.register_module_type("TorchGroupedRow", "row")
