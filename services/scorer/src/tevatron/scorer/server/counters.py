"""What the server counts, in Prometheus' text form. Written from the event loop only, so nothing is locked."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Counters and gauges of one server."""

    requests: Counter[int] = field(default_factory=Counter)
    """Answers of `/score` by status."""
    pairs: int = 0
    tokens: int = 0
    passes: int = 0
    busy_s: float = 0.0
    """Seconds in the engine."""
    truncated_pairs: int = 0
    queue_tokens: int = 0
    requests_in_flight: int = 0

    def render(self) -> str:
        """Return the text that Prometheus reads."""
        lines = [
            "# TYPE tevatron_scorer_requests_total counter",
            *(
                f'tevatron_scorer_requests_total{{status="{status}"}} {count}'
                for status, count in sorted(self.requests.items())
            ),
        ]
        for name, kind, value in (
            ("pairs_total", "counter", self.pairs),
            ("tokens_total", "counter", self.tokens),
            ("passes_total", "counter", self.passes),
            ("engine_seconds_total", "counter", round(self.busy_s, 6)),
            ("truncated_pairs_total", "counter", self.truncated_pairs),
            ("queue_tokens", "gauge", self.queue_tokens),
            ("requests_in_flight", "gauge", self.requests_in_flight),
        ):
            lines += [
                f"# TYPE tevatron_scorer_{name} {kind}",
                f"tevatron_scorer_{name} {value}",
            ]
        return "\n".join(lines) + "\n"
