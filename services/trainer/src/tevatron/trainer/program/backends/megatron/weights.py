"""A model's weights in Hugging Face's names: whole tensors streamed to rank 0, with the adapters merged into them.

The bridge's own merge is not used: in 0.6.2 it is wrong for experts spread over ranks. Each rank merges what it holds,
exports, and puts its weights back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.bridge.models.conversion.utils import unwrap_model
from megatron.bridge.peft.lora_layers import LinearAdapter, LoRALinear, LoRATopKRouter
from megatron.bridge.peft.lora_merge import LoRAMerge
from safetensors.torch import save_file
from torch import Tensor

from tevatron.core.errors import ConfigError, ContractError
from tevatron.core.nn.loading import CONFIG_FILE, DTYPES, INDEX_FILE, WEIGHTS_FILE, tensor_facts
from tevatron.trainer.program.backends.megatron.model import MegatronModel
from tevatron.trainer.program.backends.megatron.parallel import Ranks
from tevatron.trainer.program.backends.megatron.sharded import ShardedReplicas

SHARD_BYTES = 5 * 10**9


def write_weights(
    model: MegatronModel, ranks: Ranks, folder: Path | None, *, base: Path, dtype: str
) -> None:
    """Write safetensors and config.json on rank 0, which has the folder; every rank must call it."""
    assert (folder is None) == (ranks.rank != 0), "rank 0 alone writes"
    wanted = tensor_facts(base)
    writer = None if folder is None else _ShardWriter(folder, dtype=DTYPES[dtype])
    with merged_adapters(model, dtype=DTYPES[dtype]):
        for name, tensor in model.bridge.export_hf_weights(
            model.chunks,
            cpu=True,
            show_progress=False,
            conversion_tasks=_tasks(model),
            merge_adapter_weights=False,
        ):
            name = name.replace(".base_layer", "")
            if writer is not None and name in wanted:
                writer.add(name, _without_padding(name, tensor, wanted[name].shape))
    if writer is None or folder is None:
        return
    missing = sorted(set(wanted) - set(writer.names))
    if missing:
        raise ContractError(
            f"the bridge gave {len(writer.names)} of the base model's {len(wanted)} tensors; the first missing one is {missing[0]}"
        )
    writer.close()
    config = json.loads((base / CONFIG_FILE).read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = dtype
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")


def _tasks(model: MegatronModel) -> Iterator[Any] | None:
    """Return what the bridge is to do where it cannot see to it: one weight after the other is whole, for a moment."""
    replicas = model.replicas
    if not isinstance(replicas, ShardedReplicas):
        return None
    tasks = model.bridge.get_conversion_tasks(unwrap_model(model.chunks))
    # That left rows in the modules, and the bridge would take what it is given for whole over the tensor ranks too.
    replicas.chunk.start_param_sync()
    return (replace(task, param_weight=replicas.whole(task.param_name)) for task in tasks)


def _without_padding(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Cut the rows that make a vocabulary divisible by the ranks."""
    if tensor.dim() == 2 and tensor.shape[0] > shape[0] and tensor.shape[1:] == shape[1:]:
        return tensor[: shape[0]]
    if tuple(tensor.shape) != shape:
        raise ContractError(
            f"'{name}': expected the base model's shape {list(shape)}, got {list(tensor.shape)}"
        )
    return tensor


@contextmanager
def merged_adapters(model: MegatronModel, *, dtype: torch.dtype) -> Iterator[None]:
    """Within the block the wrapped weights of this rank have their adapters in them, in `dtype`."""
    kept: list[tuple[torch.nn.Parameter, Tensor]] = []
    try:
        for chunk in model.chunks:
            for module in chunk.modules():
                if isinstance(module, LoRALinear | LoRATopKRouter | LinearAdapter):
                    for parameter, merged in _merged(module):
                        kept.append((parameter, parameter.data))
                        parameter.data = merged.to(dtype)
        yield
    finally:
        for parameter, weight in kept:
            parameter.data = weight


@torch.no_grad()
def _merged(module: Any) -> Iterator[tuple[torch.nn.Parameter, Tensor]]:
    """Yield each weight under an adapter with its merged fp32 value, one for each expert of a grouped layer."""
    if isinstance(module, LinearAdapter):
        change = module.linear_out.weight.float() @ module.linear_in.weight.float()
        yield module.weight, module.weight.float() + module.scale * change
        return
    adapter, base = module.adapter, module.to_wrap
    weights = [base.weight] if getattr(base, "weight", None) is not None else _grouped(base)
    for index, weight in enumerate(weights):
        yield (
            weight,
            LoRAMerge().merge(
                weight.float(),
                _of_expert(adapter.linear_out.weight, index).float(),
                _of_expert(adapter.linear_in.weight, index).float(),
                adapter.alpha,
                adapter.dim,
                tp_group=getattr(adapter, "tp_group", None),
            ),
        )


def _grouped(base: Any) -> list[torch.nn.Parameter]:
    """Return the weights of a grouped layer, one for each of this rank's experts."""
    weights = [getattr(base, f"weight{index}", None) for index in range(base.num_gemms)]
    found = [weight for weight in weights if isinstance(weight, torch.nn.Parameter)]
    if len(found) != base.num_gemms:
        raise ConfigError(
            f"{type(base).__name__}: expected {base.num_gemms} weights of experts to merge adapters into, got {len(found)}"
        )
    return found


def _of_expert(matrix: Tensor, index: int) -> Tensor:
    """Return the expert's own matrix where there is one for each, else the one that all share."""
    return matrix[index if matrix.shape[0] > 1 else 0] if matrix.dim() == 3 else matrix


class _ShardWriter:
    """Collects tensors and writes a file whenever enough are together."""

    def __init__(self, folder: Path, *, dtype: torch.dtype) -> None:
        self._folder = folder
        self._dtype = dtype
        self._open: dict[str, Tensor] = {}
        self._open_bytes = 0
        self._total_bytes = 0
        self._files: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one whole tensor."""
        tensor = tensor.to(self._dtype) if tensor.is_floating_point() else tensor
        size = tensor.numel() * tensor.element_size()
        if self._open and self._open_bytes + size > SHARD_BYTES:
            self._flush()
        # A clone: views of one storage cannot be written side by side.
        self._open[name] = tensor.contiguous().clone()
        self._open_bytes += size
        self._total_bytes += size

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors so far."""
        return [name for file in self._files for name in file] + list(self._open)

    def close(self) -> None:
        """Write what is left and give the files the names that loaders look for."""
        self._flush()
        count = len(self._files)
        if count == 1:
            self._part(1).rename(self._folder / WEIGHTS_FILE)
            return
        weight_map = {}
        for number, names in enumerate(self._files, 1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2), encoding="utf-8")

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number}.safetensors"

    def _flush(self) -> None:
        if self._open:
            self._files.append(list(self._open))
            save_file(self._open, self._part(len(self._files)), metadata={"format": "pt"})
            self._open, self._open_bytes = {}, 0
