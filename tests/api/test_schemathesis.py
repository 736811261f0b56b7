"""Generated requests against the documented API: no 5xx, no status, media type or body that is not documented.

10 examples an operation here; `SCHEMATHESIS_EXAMPLES=200 python -m pytest tests/api/test_schemathesis.py` for more.
Event streams are left out: see test_stream.py.
"""

from __future__ import annotations

import os
import zlib

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from tests.support.resources import make_resources

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "10"))
LIVE_BODY = {"model": "base", "dataset": "train", "checkpoint": "tune", "scorers": ["served"]}
DOCUMENTED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
# Each of these sends requests of its own for every example: the long run leaves them to the short one.
PROBING = ("missing_required_header", "unsupported_method", "ignored_auth")
SHORT_RUN = 10


def is_live(value: object) -> bool:
    """Choose half of the generated values, the same ones in every run."""
    return zlib.crc32(repr(value).encode()) % 2 == 0


@pytest.fixture
def secret(make_key, sessions) -> str:
    key_id, secret = make_key("alice")
    with sessions.begin() as session:
        make_resources(session, key_id=key_id)
    return secret


@pytest.fixture
def api_schema(server_url: str, secret: str, sessions):
    """The server's own document; half of the requests name what exists."""
    live = {
        "jobs": "tune",
        "checkpoints": "tune",
        "models": "base",
        "datasets": "later",
        "scorers": "served",
        "evaluations": "table",
        "webhooks": "told",
    }
    schema = schemathesis.openapi.from_url(
        f"{server_url}/openapi.json", headers={"Authorization": f"Bearer {secret}"}
    )

    @schema.hook
    def map_path_parameters(context, path_parameters):
        if path_parameters and "ref" in path_parameters and is_live(path_parameters):
            path_parameters["ref"] = live[context.operation.path.split("/")[2]]
        return path_parameters

    @schema.hook
    def map_body(context, body):
        if isinstance(body, dict) and is_live(body):
            body.update({name: value for name, value in LIVE_BODY.items() if name in body})
        return body

    return schema


@pytest.mark.timeout(3600)
def test_every_answer_is_as_documented(api_schema, secret: str, subtests):
    names = DOCUMENTED if EXAMPLES > SHORT_RUN else DOCUMENTED + PROBING
    checks = CHECKS.get_by_names(names)
    headers = {"Authorization": f"Bearer {secret}"}
    operations = [found.ok() for found in api_schema.get_all_operations()]
    assert len(operations) > 20
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
            def check(case: schemathesis.Case) -> None:
                case.call_and_validate(headers=headers, checks=checks, timeout=60)

            with subtests.test(operation=operation.label, mode=mode.value):
                try:
                    check()
                except Unsatisfiable:
                    # Nothing negative can be said to an operation without parameters.
                    assert mode is GenerationMode.NEGATIVE
