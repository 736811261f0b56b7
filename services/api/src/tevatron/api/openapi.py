"""The OpenAPI document: what FastAPI finds, the security scheme, and problem documents in place of its own errors."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from tevatron.api.problems import Problem

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
DESCRIPTION = """Train rerankers, publish their checkpoints, serve and evaluate them.

Every error is an RFC 9457 problem document. Lists are pages: `after` takes the `next` of the page before.
"""


def install(app: FastAPI) -> None:
    """Make `app` answer with this document."""
    made: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not made:
            made.update(document(app))
        return made

    # FastAPI documents this way to replace the method.
    app.openapi = openapi  # type: ignore[method-assign]


def document(app: FastAPI) -> dict[str, Any]:
    """Return the document of an application."""
    found = get_openapi(
        title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes
    )
    schemas = found["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    _, problem = models_json_schema(
        [(Problem, "serialization")], ref_template="#/components/schemas/{model}"
    )
    schemas.update(problem["$defs"])
    found["components"]["schemas"] = dict(sorted(schemas.items()))
    found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in found["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in OPEN_PATHS else [{"key": []}]
    return found
