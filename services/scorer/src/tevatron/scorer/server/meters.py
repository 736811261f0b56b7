"""What the server measures, for Prometheus. Names follow vLLM's (`vllm:*`) and TEI's (`te_*`) where they count the same.

Written from the event loop only, into a registry of this server's own.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tevatron.core.contracts.scores import ScorerInfo

_PREFIX = "tevatron_scorer"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = tuple(2.0**power for power in range(6, 19))


class Meters:
    """Counters, gauges and histograms of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests by path and status.", "path", "status")
        self.rejected = self._counter(
            "admission_rejections", "Requests that were told to come again.", "reason"
        )
        self.latency_s = self._histogram(
            "e2e_request_latency_seconds", "From the body to the answer.", _SECONDS, "path"
        )
        self.tokenization_s = self._histogram(
            "request_tokenization_seconds", "Reading and rendering, waiting included.", _SECONDS
        )
        self.queue_s = self._histogram(
            "request_queue_time_seconds", "From the queue to the first pass.", _SECONDS
        )
        self.inference_s = self._histogram(
            "request_inference_time_seconds", "From the first pass to the last.", _SECONDS
        )
        self.running = self._gauge("num_requests_running", "Requests with prompts in passes.")
        self.waiting = self._gauge("num_requests_waiting", "Requests before their first pass.")
        self.queue_tokens = self._gauge("queue_tokens", "Tokens that wait for a pass.")
        self.pairs = self._counter("pairs", "Pairs scored.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens scored.")
        self.truncated_pairs = self._counter("truncated_pairs", "Pairs whose passage was cut.")
        self.truncated_tokens = self._counter("truncated_tokens", "Passage tokens that were cut.")
        self.batch_tokens = self._histogram("batch_tokens", "Tokens of a pass.", _TOKENS)
        self.engine_s = self._counter("engine_seconds", "Seconds in the engine.")
        self.engine_failures = self._counter("engine_failures", "Passes that raised.")
        self.ready = self._gauge("ready", "Whether pairs are scored.")
        self.probe_difference = self._gauge(
            "max_probe_difference", "Largest score difference over the contract's probes."
        )
        self.probe_tolerance = self._gauge("probe_tolerance", "Difference that was allowed.")
        self.info = self._gauge(
            "info", "What is served.", "model", "backend", "dtype", "prompt_template"
        )

    def describe(self, info: ScorerInfo) -> None:
        """Show what is served; without a contract the probes' gauges are not a number."""
        nothing = float("nan")
        difference, tolerance = info.max_probe_difference, info.probe_tolerance
        self.probe_difference.set(nothing if difference is None else difference)
        self.probe_tolerance.set(nothing if tolerance is None else tolerance)
        self.info.labels(
            info.model_name_or_path, info.backend, info.dtype, info.prompt_template
        ).set(1)

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self._registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", what, labels, registry=self._registry)

    def _gauge(self, name: str, what: str, *labels: str) -> Gauge:
        return Gauge(f"{_PREFIX}_{name}", what, labels, registry=self._registry)

    def _histogram(
        self, name: str, what: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"{_PREFIX}_{name}", what, labels, buckets=buckets, registry=self._registry
        )
