"""Prometheus metrics: what this process served, and what the database says about jobs at the time of the scrape.

Labels are kinds, states, routes and statuses; never an id, which would make a series of its own. Knows no SQL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tevatron.core.contracts.jobs import JobKind, JobState
from tevatron.core.contracts.resources import ScorerState

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


class HttpMetrics:
    """What this process answered, since it started."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "rr_http_requests_total",
            "Requests answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "rr_http_request_seconds",
            "Time until the answer was complete.",
            ["method", "route"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )

    def observe(self, *, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        method = method if method in METHODS else "other"
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)


class StoreCollector(Collector):
    """Gauges out of one look at the database, of all keys together."""

    def __init__(
        self,
        *,
        jobs: Mapping[tuple[JobKind, JobState], int],
        oldest_queued_s: Mapping[JobKind, float],
        scorers: Mapping[ScorerState, int],
    ) -> None:
        self._jobs = jobs
        self._oldest_queued_s = oldest_queued_s
        self._scorers = scorers

    def collect(self) -> Iterator[Metric]:
        """Yield the families that Prometheus asks for; what does not occur is 0, so that alerts see it."""
        jobs = GaugeMetricFamily("rr_jobs", "Jobs by kind and state.", labels=["kind", "state"])
        oldest = GaugeMetricFamily(
            "rr_job_queue_seconds", "Age of the oldest queued job.", labels=["kind"]
        )
        for kind in JobKind:
            for state in JobState:
                jobs.add_metric([kind, state], self._jobs.get((kind, state), 0))
            oldest.add_metric([kind], self._oldest_queued_s.get(kind, 0.0))
        scorers = GaugeMetricFamily("rr_scorers", "Replicas of scorers by state.", labels=["state"])
        for scorer_state in ScorerState:
            scorers.add_metric([scorer_state], self._scorers.get(scorer_state, 0))
        yield from (jobs, oldest, scorers)


def exposition(http: HttpMetrics, store: StoreCollector) -> bytes:
    """Return both in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(store)
    return generate_latest(http.registry) + generate_latest(registry)
