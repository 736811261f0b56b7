"""Engines: how token ids become scores. One Protocol, one file each, one line in the registry.

An engine knows neither text nor HTTP; the server around it does rendering, batching and the contract's proof.
"""

from __future__ import annotations

from collections.abc import Callable

from tevatron.core.errors import ConfigError, unknown_name
from tevatron.scorer.engines.base import Engine, EngineInfo, EngineOptions

__all__ = ["ENGINES", "Engine", "EngineInfo", "EngineOptions", "get_engine"]

EngineFactory = Callable[[EngineOptions], Engine]


def _hf(options: EngineOptions) -> Engine:
    from tevatron.scorer.engines.hf import (
        HfEngine,
    )  # torch: only the engine that is asked for is imported

    return HfEngine(options)


def _fake(options: EngineOptions) -> Engine:
    from tevatron.scorer.engines.fake import FakeEngine  # beside the others, which are heavy

    return FakeEngine(options)


ENGINES: dict[str, EngineFactory] = {"hf": _hf, "fake": _fake}


def get_engine(name: str) -> EngineFactory:
    """Return the factory of an engine; an unknown name lists what there is."""
    if name == "vllm":
        raise ConfigError("engine 'vllm': this build has no vLLM engine yet; use --backend hf")
    if name not in ENGINES:
        raise ConfigError(unknown_name("engine", name, ENGINES))
    return ENGINES[name]
