"""Resumable states: model, optimizer and random generators by Megatron's distributed checkpoint.

Every rank writes its part once; a run of another number of replicas reads it. Writing goes on beside the training.
What a state has of weights and optimizer is the replicas' business (`replicas`, `sharded`); where states lie and when
one is whole is that of `program.states`.
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

from tevatron.core.errors import ConfigError
from tevatron.trainer.program.backends.megatron.model import MegatronModel

WEIGHTS = "megatron"
"""Folder of the distributed checkpoint within a state."""


class PendingSave:
    """A state that a thread of this process writes while the training goes on; every rank has one.

    A thread and not Megatron's forked writers: it ends with the process, and a fork of a process that uses a GPU and
    has threads is a risk.
    """

    def __init__(self, folder: Path, model: MegatronModel, optimizer: Any) -> None:
        """Copy what is to be saved to the CPU and begin to write; every rank must do so. Rank 0 makes the folder first."""
        content = _content(model, optimizer, is_loading=False)
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


def load_state(folder: Path, model: MegatronModel, optimizer: Any) -> bool:
    """Read this rank's part back; False where the random generators are of another number of ranks."""
    common = dist_checkpointing.load_common_state_dict(str(folder / WEIGHTS))
    layout = _layout(model)
    if common["layout"] != layout:
        raise ConfigError(
            f"{folder.name} was saved with {common['layout']}, this run has {layout}; only the number of replicas may change"
        )
    model.replicas.make_moments(optimizer)
    wanted = _content(model, optimizer, is_loading=True)
    is_same_world = int(common["world"]) == torch.distributed.get_world_size()
    if not is_same_world:
        del wanted["random"]
    loaded = dist_checkpointing.load(wanted, str(folder / WEIGHTS))
    model.replicas.go_on(optimizer, loaded["model"], loaded["optimizer"])
    if is_same_world:
        _set_random(loaded["random"])
    return is_same_world


def load_weights(folder: Path, model: MegatronModel) -> None:
    """Read the weights alone, on any layout."""
    wanted = {"model": model.replicas.weights()}
    model.replicas.set_weights(dist_checkpointing.load(wanted, str(folder / WEIGHTS))["model"])


def _content(model: MegatronModel, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    return {
        "model": model.replicas.weights(),
        "optimizer": model.replicas.optimizer_state(optimizer, is_loading=is_loading),
        "random": _random(),
        "world": torch.distributed.get_world_size(),
        "layout": _layout(model),
    }


def _layout(model: MegatronModel) -> dict[str, int]:
    """Return what decides how the optimizer's state is cut."""
    return {
        **({"use_megatron_fsdp": 1} if model.replicas.is_sharded else {}),
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
    }


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
