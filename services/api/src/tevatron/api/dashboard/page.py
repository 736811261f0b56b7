"""What every page shares: its route, its form with the token against forgery, its template, and errors as pages.

The token is a hash of the browser's cookie, which another site can neither read nor set; logged in, the cookie is the
login's secret. Knows no resource.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter, Depends
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sqlalchemy.exc import InterfaceError, OperationalError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from tevatron.api.dashboard.filters import FILTERS
from tevatron.api.problems import RefusedError
from tevatron.api.security import COOKIE, PAGES
from tevatron.core.errors import ForbiddenError, InputError, TevatronError

log = logging.getLogger(__name__)
TEMPLATES = Path(__file__).parent / "templates"
MAX_FIELDS = 200
TOKEN_FIELD = "csrf"

Form = Mapping[str, str]


class PageRoute(APIRoute):
    """A route of the dashboard: it reads the form of a POST, and answers errors as pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
        """Return FastAPI's own handler, between the two."""
        handler = super().get_route_handler()

        async def page(request: Request) -> Response:
            given = request.cookies.get(COOKIE)
            visit = given or secrets.token_urlsafe(32)
            request.scope["tevatron.visit"] = visit
            try:
                if request.method == "POST":
                    request.scope["tevatron.form"] = await _read_form(request, visit)
                response = await handler(request)
            except (
                TevatronError,
                HTTPException,
                RequestValidationError,
                OperationalError,
                InterfaceError,
            ) as error:
                response = _error_page(request, error)
            if given is None and "set-cookie" not in response.headers:
                set_cookie(request, response, visit)
            return response

        return page


def page_router() -> APIRouter:
    """Return a router for pages, which are not in the OpenAPI document."""
    return APIRouter(prefix=PAGES, route_class=PageRoute, include_in_schema=False)


def form_of(request: Request) -> Form:
    """Return the fields of the form that was sent."""
    form: Form = request.scope["tevatron.form"]
    return form


CurrentForm = Annotated[Form, Depends(form_of)]


def render(
    request: Request, template: str, values: Mapping[str, object], *, status: int = 200
) -> Response:
    """Return a page."""
    text = (
        _environment()
        .get_template(template)
        .render(
            {
                **values,
                "token": _token(request.scope["tevatron.visit"]),
                "caller": request.scope.get("tevatron.caller"),
                "path": request.url.path,
            }
        )
    )
    return HTMLResponse(text, status_code=status)


def redirect(path: str) -> Response:
    """Send the browser to another page, by GET."""
    return RedirectResponse(path, status_code=303)


def set_cookie(
    request: Request, response: Response, value: str, *, lasts_s: float | None = None
) -> None:
    """Leave the cookie in the browser, until it is closed unless `lasts_s` says how long."""
    response.set_cookie(
        COOKIE,
        value,
        max_age=None if lasts_s is None else int(lasts_s),
        path=PAGES,
        secure=request.url.scheme == "https",
        httponly=True,
        samesite="strict",
    )


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(FILTERS)
    return environment


def _token(visit: str) -> str:
    return hmac.new(visit.encode(), b"form", hashlib.sha256).hexdigest()


async def _read_form(request: Request, visit: str) -> Form:
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
        raise ForbiddenError(f"this form was sent from another site: {origin[:100]}")
    try:
        fields = parse_qsl(
            (await request.body()).decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS
        )
    except ValueError as error:
        raise InputError(f"the form cannot be read: {error}") from error
    form = dict(fields)
    if not hmac.compare_digest(form.get(TOKEN_FIELD, "").encode(), _token(visit).encode()):
        raise ForbiddenError("this form is not from this page as it is now; load it again")
    for name, value in form.items():
        if "\0" in name or "\0" in value:
            raise InputError("the form holds a NUL character")
    return form


def _error_page(request: Request, error: Exception) -> Response:
    status, message = _status_and_message(error)
    if status >= 500:
        log.error("page failed", exc_info=error)
    return render(request, "error.html", {"status": status, "message": message}, status=status)


def _status_and_message(error: Exception) -> tuple[int, str]:
    if isinstance(error, TevatronError):
        return error.status_code, str(error)
    if isinstance(error, RefusedError | HTTPException):
        return error.status_code, error.detail
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return 422, f"{first['loc'][-1]}: {first['msg']}"
    return 503, "the database does not answer; try again"
