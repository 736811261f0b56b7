"""Generated requests against the scorer's own OpenAPI document: no 5xx, nothing that is not documented."""

import os

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from tests.support.scorers import live_app, served

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "25"))
DOCUMENTED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@pytest.fixture(scope="module")
def url():
    with live_app(served) as url:
        yield url


@pytest.mark.timeout(3600)
def test_every_answer_is_as_documented(url, subtests):
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} == {
        "/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/info",
        "/health",
        "/ready",
        "/metrics",
    }
    checks = CHECKS.get_by_names(DOCUMENTED)
    for operation in operations:
        for mode in GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=EXAMPLES,
                derandomize=True,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            def check(case):
                case.call_and_validate(checks=checks, timeout=60)

            with subtests.test(operation=operation.label, mode=mode.value):
                try:
                    check()
                except Unsatisfiable:
                    # Nothing negative can be said to an operation without parameters.
                    assert mode is GenerationMode.NEGATIVE
