"""Every error of the API as an RFC 9457 problem document.

Owns the document, its rendering for each kind of exception, and what OpenAPI says about it. Knows no resource.
"""

from __future__ import annotations

import http
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field, JsonValue
from pydantic_core import ErrorDetails
from sqlalchemy.exc import InterfaceError, OperationalError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tevatron.core.errors import BusyError, FormatError, TevatronError

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:tevatron:problem:"
log = logging.getLogger(__name__)

CODES: dict[int, str] = {
    400: "bad_request",
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    409: "conflict",
    413: "too_large",
    415: "unsupported_media_type",
    422: "invalid_input",
    429: "busy",
    500: "internal_error",
    503: "unavailable",
}
"""Code of a status where the error itself brings none."""

MESSAGE_CHARACTERS = 2000
"""A message that quotes what the user sent is cut here."""
GOT_CHARACTERS = 100
_WITHOUT_INPUT = frozenset({"missing", "extra_forbidden"})
"""Faults whose message says it all."""


class ProblemError(BaseModel):
    """One fault of a request."""

    message: str
    pointer: str | None = None
    """JSON pointer into the body."""
    parameter: str | None = None
    """Name of the path, query or header parameter."""
    file: str | None = None
    line: int | None = None
    field: str | None = None


class Problem(BaseModel):
    """RFC 9457 problem document; `type` is `urn:tevatron:problem:<code>`."""

    type: str
    title: str
    status: int
    code: str
    """Stable, for programs."""
    detail: str
    """For people."""
    request_id: str
    errors: list[ProblemError] = Field(default_factory=list)
    """Each fault with its place, where there is more to say than `detail`."""


class RefusedError(HTTPException):
    """A request refused by the HTTP layer, with a code and faults of its own.

    It is an HTTPException because FastAPI turns any other exception raised while it reads the body into a bare 400.
    """

    def __init__(
        self, status_code: int, detail: str, *, code: str, errors: Sequence[ProblemError] = ()
    ) -> None:
        super().__init__(status_code, detail)
        self.code = code
        self.errors = list(errors)


def render(
    status: int,
    detail: str,
    *,
    request_id: str,
    code: str | None = None,
    errors: Sequence[ProblemError] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return the problem document as a response."""
    code = code or CODES.get(status, f"http_{status}")
    problem = Problem(
        type=f"{TYPE_PREFIX}{code}",
        title=http.HTTPStatus(status).phrase,
        status=status,
        code=code,
        detail=_printable(detail),
        request_id=request_id,
        errors=list(errors),
    )
    body = problem.model_dump_json(exclude_none=True)
    return Response(body, status_code=status, media_type=MEDIA_TYPE, headers=headers)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what OpenAPI says of these error statuses, and of those that any operation can give."""
    return only(401, 403, 422, 500, 503, *statuses)


def only(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return what OpenAPI says of these error statuses."""
    content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {
        status: {"description": http.HTTPStatus(status).phrase, "content": content}
        for status in sorted(set(statuses))
    }


def install(app: FastAPI) -> None:
    """Make `app` answer every exception with a problem document."""
    app.add_exception_handler(TevatronError, _tevatron_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(OperationalError, _database_error)
    app.add_exception_handler(InterfaceError, _database_error)
    app.add_exception_handler(Exception, _unexpected)


def request_id_of(request: Request) -> str:
    """Return the id that the outermost middleware gave to this request."""
    return str(request.scope["tevatron.request_id"])


def _tevatron_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TevatronError)
    if error.status_code >= 500:
        log.error("request failed", exc_info=error)
    errors: list[ProblemError] = []
    if isinstance(error, FormatError):
        errors.append(
            ProblemError(
                message=_printable(str(error)), file=error.path, line=error.line, field=error.field
            )
        )
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, BusyError) else None
    return render(
        error.status_code,
        str(error),
        code=error.code,
        errors=errors,
        headers=headers,
        request_id=request_id_of(request),
    )


def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code, errors = (error.code, error.errors) if isinstance(error, RefusedError) else (None, [])
    return render(
        error.status_code,
        error.detail,
        code=code,
        errors=errors,
        headers=error.headers,
        request_id=request_id_of(request),
    )


def _validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    faults = [_fault(entry, error.body) for entry in error.errors()]
    first = faults[0]
    place = first.pointer if first.parameter is None else first.parameter
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    return render(
        422,
        f"{place or 'body'}: {first.message}{more}",
        code="invalid_input",
        errors=faults[:100],
        request_id=request_id_of(request),
    )


def _fault(entry: ErrorDetails, body: JsonValue) -> ProblemError:
    message, location = str(entry["msg"]), entry["loc"]
    got = entry["input"]
    if entry["type"] not in _WITHOUT_INPUT and not isinstance(got, dict | list):
        message = f"{message}, got {json.dumps(got, default=str)[:GOT_CHARACTERS]}"
    if location and location[0] == "body":
        pointer = _pointer(location[1:], body, is_missing=entry["type"] == "missing")
        return ProblemError(message=_printable(message), pointer=_printable(pointer))
    return ProblemError(
        message=_printable(message), parameter=_printable(str(location[-1])) if location else None
    )


def _pointer(location: Sequence[str | int], body: JsonValue, *, is_missing: bool) -> str:
    """Return the JSON pointer of pydantic's location, which also names the members of unions that it went through."""
    parts: list[str | int] = []
    for part in location:
        if isinstance(body, dict) and part in body:
            body = body[str(part)]
        elif isinstance(body, list) and isinstance(part, int):
            body = body[part]
        else:
            continue
        parts.append(part)
    # An empty body is missing as a whole, which the empty pointer names.
    if is_missing and location:
        parts.append(location[-1])
    return "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in parts)


def _database_error(request: Request, error: Exception) -> Response:
    log.error("database does not answer", exc_info=error)
    return render(
        503,
        "the database does not answer; try again",
        request_id=request_id_of(request),
        headers={"Retry-After": "2"},
    )


def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette raises the exception again after this answer, so that the server logs its traceback.
    return render(
        500,
        "an error on our side; the server's log has it under this request id",
        request_id=request_id_of(request),
        headers={"X-Request-ID": request_id_of(request)},  # sent outside of our own middleware
    )


def _printable(text: str) -> str:
    """Cut long text and replace lone surrogates, which no JSON document can carry."""
    return text[:MESSAGE_CHARACTERS].encode("utf-8", "replace").decode()
