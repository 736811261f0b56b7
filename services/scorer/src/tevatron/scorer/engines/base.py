"""What an engine is given, and what it must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tevatron.core.contracts.checkpoint import Dtype
from tevatron.core.contracts.train import Head
from tevatron.core.prompts import AnswerIds


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to load and how; already checked against the contract where there is one."""

    model: Path
    """Folder in Hugging Face's layout."""
    head: Head
    answer_ids: AnswerIds | None
    """Ids of the two answers; None for a `seq_cls` head."""
    dtype: Dtype | None
    """Arithmetic; the engine's own choice when unset."""
    device: str | None
    """`cpu`, `cuda`, ...; the engine's own choice when unset."""
    max_batch_tokens: int
    """Token budget of one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says about itself."""

    dtype: Dtype
    device: str
    versions: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """Scores prompts; called from one thread at a time."""

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return one score a prompt, in the order given."""

    def info(self) -> EngineInfo:
        """Describe the engine."""
