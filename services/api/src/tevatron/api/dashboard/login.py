"""Logging in with an API key, logging out, and the way to the first page."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import RedirectResponse, Response

from tevatron.api.context import CurrentContext, CurrentSession
from tevatron.api.dashboard.page import CurrentForm, page_router, redirect, render, set_cookie
from tevatron.api.security import COOKIE, PAGES
from tevatron.core.errors import NotFoundError
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.logins import LoginRepository

HOME = f"{PAGES}/jobs"
MAX_SECRET_CHARACTERS = 200

entry = APIRouter(include_in_schema=False)
router = page_router()
rest = page_router()
"""Last of all: what is no page."""


@entry.get("/")
@entry.get(PAGES)
def to_dashboard() -> Response:
    """Send a browser to the first page."""
    return RedirectResponse(HOME)


@router.get("/login")
def show_login(
    request: Request,
    session: CurrentSession,
    target: Annotated[str, Query(alias="next", max_length=4000)] = HOME,
) -> Response:
    """Show the form, unless there is no key that could be asked for."""
    if not KeyRepository(session).any_active():
        return redirect(HOME)
    return render(request, "login.html", {"target": target, "error": None})


@router.post("/login")
def log_in(
    request: Request, form: CurrentForm, session: CurrentSession, context: CurrentContext
) -> Response:
    """Take a key and leave a cookie that stands for it."""
    secret, target = form.get("key", "").strip(), form.get("next", HOME)
    key = KeyRepository(session).lookup(secret) if len(secret) <= MAX_SECRET_CHARACTERS else None
    if key is None:
        error = "This key is not known, or it is revoked."
        return render(request, "login.html", {"target": target, "error": error}, status=401)
    lasts_s = context.settings.login_s
    response = redirect(target if _is_own_page(target) else HOME)
    set_cookie(
        request, response, LoginRepository(session).open(key.id, lasts_s=lasts_s), lasts_s=lasts_s
    )
    return response


@router.post("/logout")
def log_out(request: Request, session: CurrentSession) -> Response:
    """End the login, here and in the browser."""
    LoginRepository(session).close(request.cookies.get(COOKIE, ""))
    response = redirect(f"{PAGES}/login")
    response.delete_cookie(COOKIE, path=PAGES, httponly=True, samesite="strict")
    return response


@rest.get("/{path:path}")
def show_nothing(path: str) -> Response:
    """Say that there is no such page."""
    raise NotFoundError(f"there is no page '{path}'")


def _is_own_page(target: str) -> bool:
    # A browser takes a backslash for a slash: both must not lead to another host.
    return target.startswith(f"{PAGES}/") and "\\" not in target and target.isprintable()
