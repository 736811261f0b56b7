"""Which evaluation of a run was the best, and how many since were no better. Knows no model, no rows and no files."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict


class Best(BaseModel):
    """The best evaluation so far; it belongs to a state, so that a resumed run decides as the unbroken one."""

    model_config = ConfigDict(extra="forbid")

    step: int | None = None
    """None before the first evaluation."""
    value: float = 0.0
    num_worse: int = 0
    """Evaluations since, none of them better."""

    def take(self, step: int, values: Mapping[str, float], *, metric: str) -> bool:
        """Take in an evaluation; return whether it is the best. An equal one is not: the earlier step is kept."""
        value = values[f"eval_{metric}"]
        is_better = value < self.value if metric == "loss" else value > self.value
        if self.step is not None and not is_better:
            self.num_worse += 1
            return False
        self.step, self.value, self.num_worse = step, value, 0
        return True
