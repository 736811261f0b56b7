"""Errors of the scorer as RFC 9457 problem documents, in the same form as the API's."""

from __future__ import annotations

import http
from collections.abc import Mapping

from pydantic import BaseModel
from starlette.responses import JSONResponse

from tevatron.core.errors import BusyError, TevatronError

MEDIA_TYPE = "application/problem+json"
_MOST_CHARACTERS = 2000


class Problem(BaseModel):
    """A problem document."""

    type: str
    title: str
    status: int
    code: str
    detail: str


def shown(text: str) -> str:
    """Return a message that may quote anything, short enough and without what UTF-8 cannot write."""
    return text[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()


def problem(
    status: int, detail: str, *, code: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return a problem document as a response."""
    content = Problem(
        type=f"urn:tevatron:problem:{code}",
        title=http.HTTPStatus(status).phrase,
        status=status,
        code=code,
        detail=shown(detail),
    ).model_dump()
    return JSONResponse(content, status, headers=dict(headers or {}), media_type=MEDIA_TYPE)


def problem_of(error: TevatronError) -> JSONResponse:
    """Return the problem document of one of our errors."""
    return problem(error.status_code, str(error), code=error.code, headers=retry_after(error))


def retry_after(error: TevatronError) -> dict[str, str]:
    """Return the header that says when to come again, where the error does."""
    return {"Retry-After": str(error.retry_after_s)} if isinstance(error, BusyError) else {}
