"""What a command that makes training data reports: how much it made, and which queries it left out, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class Made:
    """What was made, and what was left out and why: query ids by reason."""

    num_rows: int = 0
    num_positives: int = 0
    num_negatives: int = 0
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def leave_out(self, query_id: str, reason: str) -> None:
        """Note that a query is not used."""
        self.left_out.setdefault(reason, []).append(query_id)

    def remarks(self) -> Iterator[str]:
        """Yield a sentence for each reason, with its first queries."""
        for reason, query_ids in self.left_out.items():
            yield f"{len(query_ids)} queries left out, each {reason}: {', '.join(query_ids[:5])}"
