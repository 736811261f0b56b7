"""Resumable states: model, optimizer and random generators by Megatron's distributed checkpoint.

Every rank writes its part once; a run of another number of replicas reads it. With LoRA the adapters alone are saved:
the frozen weights are the base model's. Writing goes on beside the training. Where states lie and when one is whole is `program.states`' business.
"""

from __future__ import annotations

import queue
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding
from megatron.core.utils import unwrap_model

from tevatron.core.errors import ConfigError
from tevatron.trainer.program.backends.megatron.model import STATE_METADATA, MegatronModel
from tevatron.trainer.program.backends.megatron.sharded import make_moments

WEIGHTS = "megatron"
"""Folder of the distributed checkpoint within a state."""


class PendingSave:
    """A state that a thread of this process writes while the training goes on; every rank has one.

    A thread and not Megatron's forked writers: it ends with the process, and a fork of a process that uses a GPU and
    has threads is a risk.
    """

    def __init__(
        self, folder: Path, model: MegatronModel, optimizer: Any, *, is_lora: bool
    ) -> None:
        """Copy what is to be saved to the CPU and begin to write; every rank must do so. Rank 0 makes the folder first."""
        content = _content(model, optimizer, is_lora=is_lora, is_loading=False)
        # Megatron would start a manager process a rank for this queue, which only writers in other processes need.
        vars(filesystem_async)["_results_queue"] = queue.Queue()
        request = dist_checkpointing.save(
            content, str(folder / WEIGHTS), async_sharded_save=True, async_strategy="mcore"
        )
        self._finalizers = request.finalize_fns
        self._write = partial(request.async_fn, *_staged(request)) if request.async_fn else None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="state-writer", daemon=True)
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank's part is on disk."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the writing and complete the state; every rank must call it. Raises what the writing raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        for finalize in self._finalizers:
            finalize()

    def _run(self) -> None:
        try:
            if self._write is not None:
                self._write()
        except Exception as error:  # noqa: BLE001  raised again where the training waits for it
            self._error = error
        # The copies are as large as the model and its optimizer.
        self._write = None


def _staged(request: Any) -> list[Any]:
    """Return the writer's arguments with copies of all tensors, which the next step may change."""
    rank, buckets, results = request.async_fn_args
    copied = []
    for (path, name, (data, given)), (_, _, (_, staged)) in zip(
        buckets, request.preload_fn(), strict=True
    ):
        tensors = [
            # What was on the CPU already is no copy yet.
            (item, staged_one.clone() if given_one.device.type == "cpu" else staged_one)
            for (item, staged_one), (_, given_one) in zip(staged, given, strict=True)
        ]
        copied.append((path, name, (data, tensors)))
    return [rank, copied, results]


def load_state(folder: Path, model: MegatronModel, optimizer: Any, *, is_lora: bool) -> bool:
    """Read this rank's part back; False where the random generators are of another number of ranks."""
    common = dist_checkpointing.load_common_state_dict(str(folder / WEIGHTS))
    layout = _layout(model)
    if common["layout"] != layout:
        raise ConfigError(
            f"{folder.name} was saved with {common['layout']}, this run has {layout}; only the number of replicas may change"
        )
    if model.cut is not None:
        make_moments(optimizer)
    else:
        _fill_torch_optimizers(optimizer)
    wanted = _content(model, optimizer, is_lora=is_lora, is_loading=True)
    is_same_world = int(common["world"]) == torch.distributed.get_world_size()
    if not is_same_world:
        del wanted["random"]
    loaded = dist_checkpointing.load(wanted, str(folder / WEIGHTS))
    if model.cut is not None:
        model.cut.finish_loading(optimizer, loaded["optimizer"])
    else:
        _set_weights(model, loaded, is_lora=is_lora)
        # fp32 masters are views of parameters, which autograd does not let be written otherwise.
        with torch.no_grad():
            _load_optimizer(optimizer, loaded["optimizer"])
        _restore_torch_steps(optimizer)
    if is_same_world:
        _set_random(loaded["random"])
    return is_same_world


def load_weights(folder: Path, model: MegatronModel, *, is_lora: bool) -> None:
    """Read the weights alone, on any layout."""
    wanted = {"model": _weights(model, is_lora=is_lora)}
    _set_weights(model, dist_checkpointing.load(wanted, str(folder / WEIGHTS)), is_lora=is_lora)


def _content(
    model: MegatronModel, optimizer: Any, *, is_lora: bool, is_loading: bool
) -> dict[str, Any]:
    if model.cut is not None:
        state = model.cut.optimizer_state(optimizer)
    else:
        state = _optimizer_state(optimizer, _all_weights(model), is_loading=is_loading)
    return {
        "model": _weights(model, is_lora=is_lora),
        "optimizer": state,
        "random": _random(),
        "world": torch.distributed.get_world_size(),
        "layout": _layout(model),
    }


def _layout(model: MegatronModel) -> dict[str, int]:
    """Return what decides how the optimizer's state is cut."""
    return {
        **({"use_megatron_fsdp": 1} if model.cut is not None else {}),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }


def _parts(optimizer: Any) -> dict[int, Any]:
    """Return the optimizers that have parameters, by place; of experts and of the rest, one may have none."""
    parts = enumerate(getattr(optimizer, "chained_optimizers", [optimizer]))
    return {place: part for place, part in parts if not getattr(part, "is_stub_optimizer", False)}


def _has_empty_part(optimizer: Any) -> bool:
    return len(_parts(optimizer)) < len(getattr(optimizer, "chained_optimizers", [optimizer]))


def _optimizer_state(
    optimizer: Any, weights: dict[str, Any], *, is_loading: bool
) -> dict[Any, Any]:
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


def _load_optimizer(optimizer: Any, state: dict[Any, Any]) -> None:
    if not _has_empty_part(optimizer):
        optimizer.load_state_dict(state)
        return
    for place, part in _parts(optimizer).items():
        part.load_state_dict(state[place])


def _torch_optimizers(optimizer: Any) -> list[torch.optim.Adam]:
    """Return the parts that are torch's own Adam, as without Transformer Engine."""
    parts = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [part for part in parts if isinstance(part, torch.optim.Adam)]


def _fill_torch_optimizers(optimizer: Any) -> None:
    """Give torch's Adam its state, which it makes in its first step; Megatron asks for it before."""
    for inner in _torch_optimizers(optimizer):
        for parameter in (one for group in inner.param_groups for one in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _restore_torch_steps(optimizer: Any) -> None:
    """Hand the number of steps, which Megatron keeps by group, to each parameter, where torch's Adam looks for it."""
    for inner in _torch_optimizers(optimizer):
        for group in inner.param_groups:
            step = group.pop("step")
            for parameter in group["params"]:
                inner.state[parameter]["step"] = torch.tensor(float(step))


def _all_weights(model: MegatronModel) -> dict[str, Any]:
    if model.cut is not None:
        return model.cut.weights()
    (chunk,) = unwrap_model(model.chunks)
    weights: dict[str, Any] = chunk.sharded_state_dict(metadata=STATE_METADATA)
    return weights


def _weights(model: MegatronModel, *, is_lora: bool) -> dict[str, Any]:
    weights = _all_weights(model)
    if not is_lora:
        return weights
    return {name: part for name, part in weights.items() if ".adapter." in name}


def _set_weights(model: MegatronModel, loaded: dict[str, Any], *, is_lora: bool) -> None:
    if model.cut is not None:
        model.cut.set_weights(loaded["model"])
        return
    (chunk,) = unwrap_model(model.chunks)
    chunk.load_state_dict(loaded["model"], strict=not is_lora)


def _random() -> ShardedObject:
    version, numbers, position, _, _ = numpy.random.get_state(legacy=True)
    assert version == "MT19937"
    state = {
        "python": random.getstate(),
        "numpy": (numpy.asarray(numbers).tolist(), int(position)),
        "torch": torch.random.get_rng_state(),
        "cuda": torch.cuda.random.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    return ShardedObject("random", state, (world,), (rank,), replica_id=0)


def _set_random(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    numbers, position = state["numpy"]
    numpy.random.set_state(("MT19937", numpy.array(numbers, dtype=numpy.uint32), position, 0, 0.0))
    torch.random.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.random.set_rng_state(state["cuda"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["tracker"])
