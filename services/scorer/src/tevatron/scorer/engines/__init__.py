"""Engines: how token ids become scores. One Protocol, one file each, one line in the registry.

An engine knows neither text nor HTTP; the server around it does rendering, batching and the contract's proof.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

from tevatron.core.errors import ConfigError, unknown_name
from tevatron.scorer.engines.base import Engine, EngineFlags, EngineInfo, EngineOptions

__all__ = [
    "ENGINES",
    "Engine",
    "EngineEntry",
    "EngineFlags",
    "EngineInfo",
    "EngineOptions",
    "get_engine",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """One engine of the registry."""

    make: Callable[[EngineOptions], Engine]
    """Imports the engine and loads the model."""
    honours: frozenset[str]
    """Fields of `EngineFlags` that mean something to this engine."""
    loads_adapters: bool = False
    """Whether it puts a PEFT adapter onto a model."""


def _hf(options: EngineOptions) -> Engine:
    # torch: only the engine that is asked for is imported
    from tevatron.scorer.engines.hf import HfEngine

    return HfEngine(options)


def _vllm(options: EngineOptions) -> Engine:
    if find_spec("vllm") is None:
        raise ConfigError(
            "engine 'vllm': vLLM is not in this environment; it has one of its own, see docs/vllm.md"
        )
    from tevatron.scorer.engines.vllm import VllmEngine

    return VllmEngine(options)


ENGINES: dict[str, EngineEntry] = {
    "hf": EngineEntry(
        make=_hf,
        honours=frozenset({"device", "max_batch_tokens", "compile"}),
        loads_adapters=True,
    ),
    "vllm": EngineEntry(
        make=_vllm,
        honours=frozenset(
            {
                *("device", "max_batch_tokens", "tensor_parallel_size", "max_model_len"),
                *("gpu_memory_utilization", "max_num_seqs", "enforce_eager"),
            }
        ),
    ),
}


def get_engine(name: str) -> EngineEntry:
    """Return an engine's entry; an unknown name lists what there is."""
    if name not in ENGINES:
        raise ConfigError(unknown_name("engine", name, ENGINES))
    return ENGINES[name]
