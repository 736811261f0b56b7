"""Generated requests against the scorer's own OpenAPI document: no 5xx, nothing that is not documented."""

import os

import pytest
import schemathesis
from tests.support.documented import check_operations
from tests.support.scorers import live_app, served

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "25"))


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
    check_operations(operations, subtests, examples=EXAMPLES)
