"""What a model's config.json says of its size: the numbers that layouts and memory are worked out from.

Reads a file, no weights and no libraries. It knows the names that transformers' decoders use for each number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tevatron.core.errors import ConfigError

_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder; of a mixture of experts, `ffn` is that of one expert."""

    model_type: str
    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab: int
    is_tied: bool
    num_experts: int = 0
    """0 for a dense model."""
    experts_per_token: int = 0
    shared_ffn: int = 0
    """Width of the experts that every token passes, together."""

    @classmethod
    def read(cls, path: Path) -> ModelShape:
        """Read a config.json, or the one in a model folder."""
        file = path / "config.json" if path.is_dir() else path
        try:
            raw = json.loads(file.read_bytes())
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{file} is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{file}: expected an object")
        return cls.of(raw, where=str(file))

    @classmethod
    def of(cls, config: Mapping[str, object], *, where: str = "config.json") -> ModelShape:
        """Return the shape that a config describes; a number that is missing is a `ConfigError` that names it."""
        text = config.get("text_config")
        numbers = _Numbers({**config, **text} if isinstance(text, Mapping) else config, where)
        hidden = numbers.need("hidden_size")
        num_heads = numbers.need("num_attention_heads")
        num_experts = numbers.get(*_EXPERT_KEYS)
        dense_ffn = numbers.get("intermediate_size", "n_inner") or 4 * hidden
        expert_ffn = numbers.get("moe_intermediate_size") or dense_ffn
        shared_ffn = numbers.get("shared_expert_intermediate_size")
        if not shared_ffn:
            shared_ffn = numbers.get("n_shared_experts", "num_shared_experts") * expert_ffn
        return cls(
            model_type=str(config.get("model_type", "unknown")),
            num_layers=numbers.need("num_hidden_layers"),
            hidden=hidden,
            ffn=expert_ffn if num_experts else dense_ffn,
            num_heads=num_heads,
            num_kv_heads=numbers.get("num_key_value_heads") or num_heads,
            head_size=numbers.get("head_dim") or hidden // num_heads,
            vocab=numbers.need("vocab_size"),
            # transformers' own default
            is_tied=bool(numbers.values.get("tie_word_embeddings", True)),
            num_experts=num_experts,
            experts_per_token=numbers.get("num_experts_per_tok", "moe_topk") if num_experts else 0,
            shared_ffn=shared_ffn if num_experts else 0,
        )

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normed once more."""
        return self.model_type.startswith("qwen3")

    @property
    def attention_params(self) -> int:
        """Weights of one layer's attention, without norms."""
        query, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        return self.hidden * (2 * query + 2 * keys)

    @property
    def expert_params(self) -> int:
        """Weights of one expert, or of the dense layer's gated MLP."""
        return 3 * self.hidden * self.ffn

    @property
    def shared_params(self) -> int:
        """Weights of one layer's router and shared experts."""
        return self.hidden * (self.num_experts + 3 * self.shared_ffn)

    @property
    def embedding_params(self) -> int:
        """Weights of the input embedding; the output layer has as many unless it is tied."""
        return self.vocab * self.hidden

    @property
    def num_params(self) -> int:
        """Weights of the whole model; norms and biases, below a thousandth, are left out."""
        experts = self.expert_params * max(1, self.num_experts)
        layers = self.num_layers * (self.attention_params + experts + self.shared_params)
        return layers + self.embedding_params * (1 if self.is_tied else 2)

    @property
    def num_active_params(self) -> int:
        """Weights that one token is multiplied with, embeddings left out."""
        experts = self.expert_params * (self.experts_per_token if self.num_experts else 1)
        return self.num_layers * (self.attention_params + experts + self.shared_params)


@dataclass(frozen=True, slots=True)
class _Numbers:
    values: Mapping[str, object]
    where: str

    def get(self, *names: str) -> int:
        """Return the first of these that is a positive number, or 0."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and value > 0:
                return value
        return 0

    def need(self, name: str) -> int:
        number = self.get(name)
        if number == 0:
            raise ConfigError(
                f"{self.where}: expected a positive number '{name}', got {self.values.get(name)!r}"
            )
        return number
