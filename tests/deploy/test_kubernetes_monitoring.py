"""The dashboard and the scrape against what the services serve."""

import json
import re

from prometheus_client.parser import text_string_to_metric_families
from tests.support.manifests import of_kind

from tevatron.api import health, security
from tevatron.api.metrics import HttpMetrics, StoreCollector, exposition
from tevatron.scorer.server.meters import Meters


def exported():
    """Return the names of all series that the API and a scorer serve."""
    http = HttpMetrics()
    http.observe(method="GET", route="/v1/jobs", status=200, seconds=0.1)
    store = StoreCollector(jobs={}, oldest_queued_s={}, scorers={})
    meters = Meters()
    meters.requests.labels("/score", "200").inc()
    meters.rejected.labels("queue").inc()
    meters.latency_s.labels("/score").observe(0.1)
    text = exposition(http, store).decode() + meters.render().decode()
    return {
        sample.name for family in text_string_to_metric_families(text) for sample in family.samples
    }


def test_the_dashboard_asks_for_what_the_services_serve(gpu):
    dashboard = json.loads(
        of_kind(gpu, "ConfigMap")["tevatron-dashboard"]["data"]["dashboard.json"]
    )
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    asked = {
        name for text in expressions for name in re.findall(r"\b(?:rr|tevatron_scorer)_\w+", text)
    }
    assert len(expressions) >= 15
    assert asked - exported() == set()
    assert {"rr_jobs", "rr_job_queue_seconds", "rr_scorers"} <= asked


def test_prometheus_scrapes_a_port_and_a_path_that_are_there(gpu):
    (endpoint,) = of_kind(gpu, "ServiceMonitor")["tevatron-api"]["spec"]["endpoints"]
    assert endpoint["path"] in {route.path for route in health.router.routes}
    service = of_kind(gpu, "Service")["api"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    wanted = of_kind(gpu, "ServiceMonitor")["tevatron-api"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    # The path is not open: it takes a key.
    assert endpoint["path"] not in security.OPEN_PATHS
    assert endpoint["authorization"]["credentials"] == {
        "name": "tevatron-metrics",
        "key": "api-key",
    }
