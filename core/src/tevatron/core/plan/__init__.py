"""Memory that a training needs on each GPU, worked out from config.json before anything runs; one module a backend."""

from __future__ import annotations

import math
from typing import Protocol

from tevatron.core.contracts.plan import GIB, Plan
from tevatron.core.contracts.train import TrainArguments
from tevatron.core.errors import ConfigError, unknown_name
from tevatron.core.model_shape import ModelShape
from tevatron.core.plan import hf, megatron


class Planner(Protocol):
    """What a backend's module has."""

    def plan(
        self, shape: ModelShape, arguments: TrainArguments, *, num_gpus: int, gpu_bytes: int
    ) -> Plan:
        """Return the memory of what is asked for and the layouts that fit; what cannot be is a `ConfigError`."""


PLANNERS: dict[str, Planner] = {"hf": hf, "megatron": megatron}


def make_plan(
    shape: ModelShape, arguments: TrainArguments, *, backend: str, num_gpus: int, gpu_gib: float
) -> Plan:
    """Return the backend's plan; an unknown backend, an impossible layout or no size of a GPU is a `ConfigError`."""
    if not 0 < gpu_gib < math.inf:
        raise ConfigError(f"a GPU's memory in GiB is above 0 and finite, got {gpu_gib:g}")
    if backend not in PLANNERS:
        raise ConfigError(unknown_name("backend", backend, PLANNERS))
    gpu_bytes = round(gpu_gib * GIB)
    return PLANNERS[backend].plan(shape, arguments, num_gpus=num_gpus, gpu_bytes=gpu_bytes)


__all__ = ["PLANNERS", "Planner", "make_plan"]
