"""From a route's work to its answer: errors become problems, every answer is counted, and OpenAPI knows both."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ValidationError
from starlette.responses import Response

from tevatron.core.errors import TevatronError
from tevatron.scorer.server.problems import MEDIA_TYPE, Problem, problem_of
from tevatron.scorer.server.service import ClientGoneError, Service

_CLIENT_GONE = 499
"""As other servers write it; nobody reads it."""
_COMPONENT = "#/components/schemas/{model}"


async def answered(
    service: Service,
    path: str,
    work: Callable[[], Awaitable[Response]],
    *,
    refusal: Callable[[TevatronError], Response] = problem_of,
) -> Response:
    """Do a request's work; our errors are written by `refusal`, and whatever comes out is counted."""
    status, started = (
        500,
        perf_counter(),
    )  # 500: what is none of our errors goes on to the handler of last resort
    try:
        with service.in_flight():
            response = await work()
        service.meters.latency_s.labels(path).observe(perf_counter() - started)
        status = response.status_code
    except TevatronError as error:
        response = refusal(error)
        status = response.status_code
    except ClientGoneError:
        status = _CLIENT_GONE
        response = Response(status_code=status)
    finally:
        service.meters.requests.labels(path, str(status)).inc()
    return response


def json_response(content: BaseModel, *, exclude_none: bool = False) -> Response:
    """Return the content as the answer."""
    return Response(
        content.model_dump_json(exclude_none=exclude_none), media_type="application/json"
    )


def first_fault(error: ValidationError) -> str:
    """Say what is wrong first, where, and how much else is."""
    faults = error.errors(include_url=False, include_input=False)
    place = ".".join(str(part) for part in faults[0]["loc"]) or "body"
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return f"{place}: {faults[0]['msg'].removeprefix('Value error, ')}{more}"


def body_of(*models: type[BaseModel]) -> dict[str, Any]:
    """Return what OpenAPI must know of a body that the route reads itself; `openapi` puts its parts in their place."""
    schemas = [model.model_json_schema(ref_template=_COMPONENT) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def openapi(app: FastAPI) -> dict[str, Any]:
    """Return the app's OpenAPI document, with the parts of `body_of`'s schemas among the components."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = document.setdefault("components", {}).setdefault("schemas", {})
    for path in document["paths"].values():
        for operation in path.values():
            content = operation.get("requestBody", {}).get("content", {})
            schema = content.get("application/json", {}).get("schema", {})
            for part in [schema, *schema.get("anyOf", [])]:
                components.update(part.pop("$defs", {}))
    return document


def refusals(
    *statuses: int, other_form: type[BaseModel] | None = None
) -> dict[int | str, dict[str, Any]]:
    """Return what OpenAPI must know of a route's errors, which may have another form beside the problem document."""
    content = {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}
    if other_form is not None:
        content["application/json"] = {"schema": other_form.model_json_schema()}
    return {status: {"description": "Refused.", "content": content} for status in statuses}
