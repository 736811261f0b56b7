"""Weights, optimizer, scheduler and random state of a Trainer, to and from a folder.

Works alike for one process, DDP and FSDP: rank 0 writes whole tensors, every rank its random state. Which folder, and
when it counts as whole, is `program.states`' business.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

WEIGHTS_FILE = "weights.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
SCHEDULER_FILE = "scheduler.pt"

_FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=False)


def trainable_weights(module: nn.Module, *, sharded: bool) -> dict[str, Tensor]:
    """Return the trained tensors whole, by name, tied ones once; every rank calls this when sharded."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    if not sharded:
        parameters = dict(module.named_parameters())
        return {name: parameters[name].detach().cpu().contiguous() for name in names}
    whole: dict[str, Any] = dict(get_model_state_dict(module, options=_FULL))
    return {name: whole[name].contiguous() for name in names if name in whole}


def load_trainable_weights(module: nn.Module, file: Path, *, sharded: bool) -> None:
    """Put saved tensors back; a name or shape that does not fit is an error."""
    tensors = load_file(file)
    if sharded:
        set_model_state_dict(
            module, dict(tensors), options=StateDictOptions(full_state_dict=True, strict=False)
        )
        return
    own = {name: one for name, one in module.named_parameters() if one.requires_grad}
    if own.keys() != tensors.keys():
        different = sorted(own.keys() ^ tensors.keys())
        raise ValueError(
            f"{file} does not hold this model's trained tensors: {len(different)} names differ, {different[:3]}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            if parameter.shape != tensors[name].shape:
                raise ValueError(
                    f"{file}: '{name}' has shape {tuple(tensors[name].shape)}, expected {tuple(parameter.shape)}"
                )
            parameter.copy_(tensors[name])


def save_weights(tensors: dict[str, Tensor], folder: Path) -> None:
    """Write the tensors of a state."""
    save_file(tensors, folder / WEIGHTS_FILE)


def optimizer_state(module: nn.Module, optimizer: Optimizer, *, sharded: bool) -> dict[str, Any]:
    """Return the optimizer's state whole; every rank calls this when sharded."""
    if sharded:
        return dict(get_optimizer_state_dict(module, optimizer, options=_FULL))
    return optimizer.state_dict()


def load_optimizer_state(
    module: nn.Module, optimizer: Optimizer, file: Path, *, sharded: bool
) -> None:
    """Put the optimizer's state back."""
    state = torch.load(file, map_location="cpu", weights_only=True)
    if sharded:
        set_optimizer_state_dict(
            module, optimizer, state, options=StateDictOptions(full_state_dict=True)
        )
    else:
        optimizer.load_state_dict(state)


def save_random_state(folder: Path, *, rank: int) -> None:
    """Write the generators of a rank."""
    name, keys, position, _, _ = numpy.random.get_state(legacy=True)
    assert name == "MT19937"
    assert not isinstance(keys, str)
    state = {
        "python": random.getstate(),
        "numpy": (keys.tolist(), int(position)),
        "torch": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.random.get_rng_state()
    torch.save(state, _random_file(folder, rank))


def load_random_state(folder: Path, *, rank: int) -> bool:
    """Put the generators of a rank back; False where the state was saved by fewer ranks."""
    file = _random_file(folder, rank)
    if not file.is_file():
        return False
    state = torch.load(file, map_location="cpu", weights_only=True)
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    keys, position = state["numpy"]
    numpy.random.set_state(("MT19937", numpy.array(keys, dtype=numpy.uint32), position, 0, 0.0))
    torch.random.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.random.set_rng_state(state["cuda"])
    return True


def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random-{rank}.pt"
