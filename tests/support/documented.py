"""Generated requests against an OpenAPI document: nothing that is not documented, and no 5xx."""

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

DOCUMENTED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


def check_operations(operations, subtests, *, examples, names=DOCUMENTED, headers=None) -> None:
    """Send each operation that many valid and as many invalid requests, each mode in a subtest of its own."""
    checks = CHECKS.get_by_names(names)
    for operation in operations:
        for mode in GenerationMode:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=examples,
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
