"""The two temperatures that losses divide scores by."""

from __future__ import annotations

from typing import NamedTuple


class Temperatures(NamedTuple):
    """Divisors of the model's and of the teacher's scores."""

    student: float = 1.0
    teacher: float = 1.0
