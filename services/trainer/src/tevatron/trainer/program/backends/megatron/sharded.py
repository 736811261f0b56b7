"""Megatron-FSDP: weights, gradients and optimizer cut over the replicas (ZeRO-2 and 3), and what a state has of them.

Each replica has some rows of each weight. A state has them under the names and at the places that they have in whole
weights, so that any number of replicas goes on from it, and what reads the weights alone does not know that they were
cut. It knows no files.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed.tensor import DTensor

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's numbers of each weight."""


class _Place(NamedTuple):
    """Where rows of a weight lie in a state."""

    first: int
    """Row of the weight that this place begins with: gate and up are one weight with two places."""
    whole: ShardedTensor
    """Without its numbers."""


class ShardedReplicas:
    """A model that is cut over the replicas, as a state takes and gives it."""

    is_sharded = True

    def __init__(
        self, chunk: Any, config: Any, ddp: DistributedDataParallelConfig, *, state: dict[str, Any]
    ) -> None:
        """Cut it as `ddp` says.

        state: what a state would have of the weights before they are cut.
        """
        # Two layers' numbers are under way at most; Megatron would have a thousand million, however small the layers are.
        layers = [one for one in chunk.modules() if isinstance(one, TransformerLayer)]
        sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in layers]
        ddp.suggested_communication_unit_size = 2 * max(sizes)
        # Gradients of what is in no unit, which is everything where weights stay whole, would be summed in one piece.
        ddp.bucket_size = max(sizes)
        self._places = {
            name: _places(one)
            for name, one in state.items()
            if isinstance(one, ShardedTensor | ShardedTensorFactory)
        }
        self._others = {name: one for name, one in state.items() if name not in self._places}
        self._dtype = config.params_dtype
        self.chunk = FullyShardedDataParallel(
            config=config,
            ddp_config=ddp,
            module=chunk,
            device=torch.device(torch.cuda.current_device()),
        )
        unwrap_model(chunk).register_forward_pre_hook(self._gather_output_layer)

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """Return a whole weight, put together from the replicas' rows; every rank must ask for it."""
        one = self._own()[name]
        rows, first = _local(one), _first_row(one)
        found = torch.zeros(one.orig_param.shape, dtype=self._dtype, device=rows.device)
        found[first : first + len(rows)] = rows
        # A sum with zeros, since the replicas have unlike numbers of rows, which a gather does not take everywhere.
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        torch.distributed.all_reduce(found, group=group)
        return found

    @property
    def num_held(self) -> int:
        """How many numbers of the weights are in memory between the passes."""
        groups = self.chunk.param_and_grad_buffer.parameter_groups
        return sum(group.model_weight_buffer.data.numel() for group in groups)

    def weights(self) -> dict[str, Any]:
        """Return what a state has of this replica's rows of the weights; of fp32 weights they are the rows themselves."""
        rows = {name: _local(one).to(self._dtype) for name, one in self._own().items()}
        return {**self._others, **self._placed(rows)}

    def optimizer_state(self, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
        """Return what a state has of the optimizer: moments, and weights that are finer than the model's, as they are in memory."""
        del is_loading  # Megatron's own optimizers make something else of it.
        own, inner = self._own(), optimizer.optimizer
        numbers = {}
        if self._dtype is not torch.float32:
            numbers["weight"] = {name: _local(one) for name, one in own.items()}
        for moment in _MOMENTS:
            numbers[moment] = {
                name: _local(inner.state[one][moment])
                for name, one in own.items()
                if inner.state.get(one)
            }
        found: dict[str, Any] = {
            kind: self._placed(rows, prefix=f"optimizer.{kind}.") for kind, rows in numbers.items()
        }
        return {**found, "step": _num_steps(inner)}

    @torch.no_grad()
    def set_weights(self, state: dict[str, Any]) -> None:
        """Take what was loaded into `weights`."""
        for name, one in self._own().items():
            if name in state:
                local = _local(one)
                local.copy_(torch.cat([part.flatten() for part in state[name]]).view_as(local))
        self._use_rows()

    def make_moments(self, optimizer: Any) -> None:
        """Have the optimizer make the state that it makes in its first step; the weights are of no use until they are loaded."""
        inner = optimizer.optimizer
        for weight in (one for group in inner.param_groups for one in group["params"]):
            if _local(weight).numel():
                weight.grad = torch.zeros_like(weight)
        inner.step()
        inner.zero_grad()

    def go_on(self, optimizer: Any, weights: dict[str, Any], state: dict[str, Any]) -> None:
        """Train on from what was loaded into `weights` and `optimizer_state`: the rows themselves, and the number of steps."""
        del weights  # Of fp32 weights they are the rows; finer ones are in the optimizer's state.
        _set_num_steps(optimizer.optimizer, state["step"])
        self._use_rows()

    def _gather_output_layer(self, model: Any, _: object) -> None:
        """Have the output layer's weight whole for the pass: its rows are taken without its forward being called."""
        weights = list(model.output_layer.parameters(recurse=False))
        self.chunk.module.all_gather_and_wait_parameters_ready(weights, prefetch=False)

    def _use_rows(self) -> None:
        """Have the model compute with the optimizer's weights."""
        self.chunk.module.install_optimized_model_weights()

    def _own(self) -> dict[str, Any]:
        """Return the optimizer's weights by name: distributed tensors, which know this replica's rows."""
        named = self.chunk.param_and_grad_buffer.optimizer_named_parameters
        return {name.removeprefix("module."): weight for name, weight in named}

    def _placed(
        self, rows: dict[str, Tensor], *, prefix: str = ""
    ) -> dict[str, list[ShardedTensor]]:
        own = self._own()
        found = {}
        for name, data in rows.items():
            first = _first_row(own[name])
            parts = [_within(place, first, data, prefix) for place in self._places[name]]
            found[name] = [part for part in parts if part is not None]
        return {name: parts for name, parts in found.items() if parts}


def _set_num_steps(inner: Any, number: int) -> None:
    """Say how many steps the moments are of; torch's Adam keeps it by weight, Transformer Engine's by group."""
    if isinstance(inner, torch.optim.Adam):
        for state in inner.state.values():
            state["step"].fill_(number)
        return
    for group in inner.param_groups:
        group["step"] = number


def _num_steps(inner: Any) -> int:
    steps = [state["step"] for state in inner.state.values() if "step" in state]
    return int(steps[0] if steps else inner.param_groups[0].get("step", 0))


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def _first_row(weight: Any) -> int:
    """Return the number of the first row that this replica has of a weight."""
    first: int = weight.megatron_fsdp_slice.start // math.prod(weight.orig_param.shape[1:])
    return first


def _places(weight: ShardedTensor | ShardedTensorFactory) -> list[_Place]:
    if isinstance(weight, ShardedTensor):
        return [_Place(0, weight.without_data())]
    parts = replace(weight, data=torch.empty_like(weight.data, device="meta")).build()
    found, first = [], 0
    for part in parts:
        found.append(_Place(first, part.without_data()))
        first += part.local_shape[0]
    return found


def _within(place: _Place, first: int, rows: Tensor, prefix: str) -> ShardedTensor | None:
    """Return those of the rows that lie in this place, None where there are none; `first` is the number of the first row."""
    whole = place.whole
    begin = max(first, place.first)
    end = min(first + len(rows), place.first + whole.local_shape[0])
    if begin >= end:
        return None
    axis = whole.prepend_axis_num
    data = rows[begin - first : end - first]
    data = data.view((1,) * axis + tuple(data.shape))
    offset = list(whole.global_offset)
    offset[axis] += begin - place.first
    return replace(
        whole,
        key=prefix + whole.key,
        data=data,
        dtype=data.dtype,
        local_shape=tuple(data.shape),
        global_offset=tuple(offset),
        # Rows are not cut evenly.
        axis_fragmentations=None,
        # Of the replicas this one alone has them.
        replica_id=(*whole.replica_id[:-1], 0),
        prepend_axis_num=0,
    )
