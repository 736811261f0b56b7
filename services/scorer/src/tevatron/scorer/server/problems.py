"""Errors of the scorer as RFC 9457 problem documents, in the same form as the API's."""

from __future__ import annotations

import http
from collections.abc import Mapping

from starlette.responses import JSONResponse

from tevatron.core.errors import BusyError, TevatronError

MEDIA_TYPE = "application/problem+json"
_MOST_CHARACTERS = 2000


def problem(
    status: int, detail: str, *, code: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return a problem document as a response."""
    # Lone surrogates of a quoted text cannot be written as UTF-8.
    shown = detail[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()
    content = {
        "type": f"urn:tevatron:problem:{code}",
        "title": http.HTTPStatus(status).phrase,
        "status": status,
        "code": code,
        "detail": shown,
    }
    return JSONResponse(content, status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def problem_of(error: TevatronError) -> JSONResponse:
    """Return the problem document of one of our errors."""
    headers = {"Retry-After": str(error.retry_after_s)} if isinstance(error, BusyError) else None
    return problem(error.status_code, str(error), code=error.code, headers=headers)
