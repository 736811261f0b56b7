"""Parallel layouts: how many ranks each axis takes, and whether a model can be cut that way.

Pure arithmetic, done before anything loads. Data parallelism is what the other axes leave over; experts are spread
over the ranks of the other axes within a pipeline stage and take none of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from tevatron.core.errors import ConfigError
from tevatron.core.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A world of ranks and the size of each axis."""

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1

    @property
    def data(self) -> int:
        """Replicas; each takes its own queries of a step."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Ranks that hold the same experts."""
        return self.world // (self.pipeline * self.expert)

    def __str__(self) -> str:
        sizes = {
            "TP": self.tensor,
            "PP": self.pipeline,
            "CP": self.context,
            "EP": self.expert,
            "DP": self.data,
        }
        return " ".join(
            f"{name}={size}" for name, size in sizes.items() if size > 1 or name == "DP"
        )

    def check(self, shape: ModelShape) -> None:
        """Raise `ConfigError` with all the numbers unless this model can be cut this way."""
        problems = [*self._world_problems(), *self._model_problems(shape)]
        if problems:
            raise ConfigError("; ".join(problems))

    def _world_problems(self) -> list[str]:
        sizes = {
            "tensor_model_parallel_size": self.tensor,
            "pipeline_model_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
            "expert_model_parallel_size": self.expert,
        }
        low = [
            f"{name}: expected at least 1, got {size}" for name, size in sizes.items() if size < 1
        ]
        if low:
            return low
        replica = self.tensor * self.pipeline * self.context
        if self.world % replica:
            return [
                f"tensor_model_parallel_size({self.tensor}) * pipeline_model_parallel_size({self.pipeline}) "
                f"* context_parallel_size({self.context}) = {replica} must divide the world of {self.world} ranks"
            ]
        if self.world // self.pipeline % self.expert:
            return [
                f"expert_model_parallel_size({self.expert}) must divide the {self.world // self.pipeline} ranks of a "
                f"pipeline stage (world {self.world} / pipeline_model_parallel_size {self.pipeline})"
            ]
        return []

    def _model_problems(self, shape: ModelShape) -> list[str]:
        problems = [
            f"{axis}({size}) must divide the model's {number} {what}"
            for axis, size, number, what in (
                ("tensor_model_parallel_size", self.tensor, shape.num_heads, "attention heads"),
                ("tensor_model_parallel_size", self.tensor, shape.num_kv_heads, "key-value heads"),
                ("pipeline_model_parallel_size", self.pipeline, shape.num_layers, "layers"),
            )
            if size > 0 and number % size
        ]
        # Experts stay whole: they are spread, not cut.
        width = shape.shared_ffn if shape.num_experts else shape.ffn
        if self.tensor > 0 and width % self.tensor:
            problems.append(
                f"tensor_model_parallel_size({self.tensor}) must divide the MLP's width of {width}"
            )
        if self.expert > 1 and not shape.num_experts:
            problems.append(
                f"expert_model_parallel_size: expected 1 for a dense model ({shape.model_type}), got {self.expert}"
            )
        elif self.expert > 1 and shape.num_experts % self.expert:
            problems.append(
                f"expert_model_parallel_size({self.expert}) must divide the model's {shape.num_experts} experts"
            )
        return problems
