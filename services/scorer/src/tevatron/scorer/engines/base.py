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
class EngineFlags:
    """What a user may ask of an engine; None and False leave it to the engine.

    An engine's line in the registry names the fields that it honours. The server refuses the flags of the others, so
    an engine reads its own fields and need not look at the rest.
    """

    device: str | None = None
    """`cpu`, `cuda`, `cuda:1`."""
    max_batch_tokens: int | None = None
    """Token budget of one forward pass."""
    compile: bool = False
    """Whether torch compiles the model first."""
    tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    """Longest sequence in tokens that the engine makes room for; never below the longest prompt."""
    gpu_memory_utilization: float | None = None
    max_num_seqs: int | None = None
    enforce_eager: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """What to load and how; already checked against the contract where there is one."""

    model: Path
    """Folder in Hugging Face's layout."""
    adapter: Path | None = None
    """Folder of a PEFT adapter of this model; only where the engine's registry line says that it loads them."""
    head: Head
    answer_ids: AnswerIds | None
    """Ids of the two answers; None for a `seq_cls` head."""
    max_length: int
    """Longest prompt in tokens that it will be given."""
    dtype: Dtype | None = None
    """Arithmetic; the engine's own choice when unset."""
    flags: EngineFlags = field(default_factory=EngineFlags)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine says about itself."""

    dtype: Dtype
    device: str
    max_batch_tokens: int = 8192
    """Tokens of one pass, and so of a call."""
    queues_calls: bool = False
    """Whether `score` may be called while it runs: the next calls are prepared while a device is busy with one."""
    vocab_size: int | None = None
    """Ids that the model knows; None where any will do. The server refuses a pair whose tokenizer gives another."""
    versions: dict[str, str] = field(default_factory=dict)


class Engine(Protocol):
    """Scores prompts; called from several threads at a time where its info says `queues_calls`."""

    def score(self, token_ids: Sequence[Sequence[int]]) -> list[float]:
        """Return one fp32 score a prompt, in the order given; what cannot be scored is an error, never a number."""

    def info(self) -> EngineInfo:
        """Describe the engine."""
