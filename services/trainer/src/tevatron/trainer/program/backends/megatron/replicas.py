"""Plain replicas, each with the whole of its rank's weights, and what a state has of them and of Megatron's optimizer.

With LoRA a state has the adapters alone: the frozen weights are the base model's. `sharded` has the replicas that share
their weights, with the same methods. It knows no files.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.utils import unwrap_model

STATE_METADATA = {"distrib_optim_sharding_type": "dp_reshardable"}
"""How a state has the optimizer of replicas: as its buffers are, nothing gathered, for any number of replicas."""


class Replicas:
    """The weights and the optimizer of a rank, as a state takes and gives them."""

    is_sharded = False

    def __init__(self, chunks: list[Any], *, is_lora: bool) -> None:
        self._chunks = chunks
        self._is_lora = is_lora

    def weights(self) -> dict[str, Any]:
        """Return what a state has of the weights."""
        weights = self._all_weights()
        if not self._is_lora:
            return weights
        return {name: part for name, part in weights.items() if ".adapter." in name}

    def set_weights(self, loaded: dict[str, Any]) -> None:
        """Take what was loaded into `weights`."""
        (chunk,) = unwrap_model(self._chunks)
        chunk.load_state_dict(loaded, strict=not self._is_lora)

    def optimizer_state(self, optimizer: Any, *, is_loading: bool) -> dict[Any, Any]:
        """Return what a state has of the optimizer."""
        weights = self._all_weights()
        if not _has_empty_part(optimizer):
            state: dict[Any, Any] = optimizer.sharded_state_dict(
                weights, is_loading=is_loading, metadata=STATE_METADATA
            )
            return state
        # Megatron asks the empty part for a state that it does not have.
        found = {}
        for place, part in _parts(optimizer).items():
            found[place] = part.sharded_state_dict(
                weights, is_loading=is_loading, metadata=STATE_METADATA
            )
            add_prefix_for_sharding(found[place], f"chained_{place}.")
        return found

    def make_moments(self, optimizer: Any) -> None:
        """Give torch's Adam its state, which it makes in its first step; Megatron asks for it before."""
        for inner in _torch_optimizers(optimizer):
            for parameter in (one for group in inner.param_groups for one in group["params"]):
                if not inner.state[parameter]:
                    inner.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }

    def go_on(self, optimizer: Any, weights: dict[str, Any], state: dict[Any, Any]) -> None:
        """Train on from what was loaded into `weights` and `optimizer_state`."""
        self.set_weights(weights)
        # fp32 masters are views of parameters, which autograd does not let be written otherwise.
        with torch.no_grad():
            if _has_empty_part(optimizer):
                for place, part in _parts(optimizer).items():
                    part.load_state_dict(state[place])
            else:
                optimizer.load_state_dict(state)
        _restore_torch_steps(optimizer)

    def _all_weights(self) -> dict[str, Any]:
        (chunk,) = unwrap_model(self._chunks)
        weights: dict[str, Any] = chunk.sharded_state_dict(metadata=STATE_METADATA)
        return weights


def _parts(optimizer: Any) -> dict[int, Any]:
    """Return the optimizers that have parameters, by place; of experts and of the rest, one may have none."""
    parts = enumerate(getattr(optimizer, "chained_optimizers", [optimizer]))
    return {place: part for place, part in parts if not getattr(part, "is_stub_optimizer", False)}


def _has_empty_part(optimizer: Any) -> bool:
    return len(_parts(optimizer)) < len(getattr(optimizer, "chained_optimizers", [optimizer]))


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Adam]:
    """Return the parts that are torch's own Adam, as without Transformer Engine."""
    parts = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [part for part in parts if isinstance(part, torch.optim.Adam)]


def _restore_torch_steps(optimizer: Any) -> None:
    """Hand the number of steps, which Megatron keeps by group, to each parameter, where torch's Adam looks for it."""
    for inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            step = group.pop("step")
            for parameter in group["params"]:
                inner.state[parameter]["step"] = torch.tensor(float(step))
