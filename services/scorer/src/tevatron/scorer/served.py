"""What is asked to be served, and what is served: light, so that a wrong flag is found before torch is imported."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tevatron.core.contracts.checkpoint import Dtype
from tevatron.core.contracts.scores import ScorerInfo
from tevatron.core.contracts.train import Head
from tevatron.core.prompts import Renderer
from tevatron.scorer.engines import Engine, EngineFlags

DEFAULT_MAX_LENGTH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to serve; what is None is the contract's, or a default where there is none."""

    backend: str
    model: Path
    """Folder, or a hub id; of weights, or of a PEFT adapter that names its base model."""
    revision: str | None = None
    """Of a hub id."""
    adapter: Path | None = None
    """Folder of a PEFT adapter for `model`."""
    tokenizer: Path | None = None
    """Folder of the tokenizer, where it is not the model's."""
    prompt_template: str | None = None
    query_prefix: str | None = None
    passage_prefix: str | None = None
    append_eos: bool | None = None
    max_length: int | None = None
    head: Head | None = None
    dtype: Dtype | None = None
    flags: EngineFlags = field(default_factory=EngineFlags)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A proved engine with the renderer of its prompts."""

    engine: Engine
    renderer: Renderer
    info: ScorerInfo
