from __future__ import annotations

import json
from pathlib import Path

from fastapi import FastAPI

from tevatron.api.openapi import document

COMMITTED = Path(__file__).parents[2] / "docs" / "openapi.json"


def test_the_committed_document_is_this_builds(app: FastAPI):
    found = json.loads(COMMITTED.read_text())
    assert found == json.loads(json.dumps(document(app))), (
        "docs/openapi.json is old: run `make openapi`"
    )


def test_every_operation_has_a_name_and_documents_its_errors(app: FastAPI):
    names = []
    for path, operations in document(app)["paths"].items():
        for method, operation in operations.items():
            names.append(operation["operationId"])
            statuses = set(operation["responses"])
            expected = (
                {"500"} if operation["security"] == [] else {"401", "403", "422", "500", "503"}
            )
            assert expected <= statuses, (method, path)
            if method in ("post", "put", "delete"):
                assert {"413", "415"} <= statuses, (method, path)
            for status, response in operation["responses"].items():
                if int(status) >= 400 and path != "/readyz":
                    assert list(response["content"]) == ["application/problem+json"], (
                        method,
                        path,
                        status,
                    )
    assert len(names) == len(set(names))
    assert "submit_jobs" in names


def test_no_schema_offers_a_token_to_readers(app: FastAPI):
    schemas = document(app)["components"]["schemas"]
    assert "token" in schemas["ScorerRequest"]["properties"]
    assert "token" not in schemas["ScorerResource"]["properties"]
    assert "HTTPValidationError" not in schemas
