"""Who is asking: API keys, and the one case without them, a loopback address with a loopback Host header.

REST knows keys in the header only; the dashboard's pages know the cookie of a login only, so that no other site can make a
browser use it on a REST route.
A pure ASGI middleware in front of the router, so that no route can be forgotten. Endpoints take the `Caller`.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote, urlsplit

from fastapi import Depends, Request
from sqlalchemy.exc import InterfaceError, OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from tevatron.api.problems import render
from tevatron.core.errors import ForbiddenError, TevatronError, UnauthorizedError
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.logins import LoginRepository
from tevatron.core.store.models import ApiKey, KeyRole
from tevatron.core.store.repository import EveryKey, KeyScope
from tevatron.core.store.session import Sessions

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Probes come without a key, and learn nothing but whether the service works."""
PAGES = "/ui"
"""Where the dashboard's pages are."""
LOGIN_PATH = f"{PAGES}/login"
STATIC_PATH = f"{PAGES}/static"
COOKIE = "tevatron_login"
MAX_SECRET_CHARACTERS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The key of a request; without any key in the database the local user, who may do everything."""

    key_id: str | None
    is_admin: bool

    @property
    def scope(self) -> KeyScope:
        """Whose rows this caller may read, and use."""
        return EveryKey(own=self.key_id) if self.is_admin else self.key_id


class Authentication:
    """Put the `Caller` into the scope, or answer 401 or 403."""

    def __init__(self, app: ASGIApp, *, sessions: Sessions, bind_host: str) -> None:
        self.app = app
        self.sessions = sessions
        self.is_local = is_loopback(bind_host)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request with a known key through."""
        if scope["type"] != "http" or is_open(scope["path"]):
            await self.app(scope, receive, send)
            return
        try:
            find = self._visitor if is_page(scope["path"]) else self._caller
            caller = await run_in_threadpool(find, Headers(scope=scope))
        except TevatronError as error:
            status, detail, code = error.status_code, str(error), error.code
        except (OperationalError, InterfaceError):
            status, detail, code = 503, "the database does not answer; try again", "unavailable"
        else:
            scope["tevatron.caller"] = caller
            await self.app(scope, receive, send)
            return
        response: Response
        if status == 401 and is_page(scope["path"]):
            response = _to_login(scope)
        else:
            headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
            response = render(
                status, detail, code=code, headers=headers, request_id=scope["tevatron.request_id"]
            )
        await response(scope, receive, send)

    def _caller(self, headers: Headers) -> Caller:
        authorization = headers.get("authorization")
        with self.sessions.begin() as session:
            keys = KeyRepository(session)
            if authorization is None and not keys.any_active():
                self._check_local(headers)
                return Caller(key_id=None, is_admin=True)
            key = keys.lookup(_bearer(authorization))
            if key is None:
                raise UnauthorizedError("the API key is not known, or it is revoked")
            return _caller_with(key)

    def _visitor(self, headers: Headers) -> Caller:
        cookie = cookie_parser(headers.get("cookie", "")).get(COOKIE)
        with self.sessions.begin() as session:
            key = LoginRepository(session).key_of(cookie) if cookie else None
            if key is not None:
                return _caller_with(key)
            if KeyRepository(session).any_active():
                raise UnauthorizedError("no login")
            self._check_local(headers)
            return Caller(key_id=None, is_admin=True)

    def _check_local(self, headers: Headers) -> None:
        if not self.is_local:
            raise UnauthorizedError(
                "no API key exists yet; make one with `tevatron keys create`: without keys only a loopback address is served"
            )
        # A web page on another site can make a browser send requests here: its name is then in Origin, or, where
        # it made its own name point to this machine, in Host.
        host = headers.get("host", "")
        if not is_loopback(_host_of(f"//{host}")):
            raise ForbiddenError(f"expected a loopback Host without an API key, got {host[:100]!r}")
        origin = headers.get("origin")
        if origin is not None and not is_loopback(_host_of(origin)):
            raise ForbiddenError(
                f"expected no foreign Origin without an API key, got {origin[:100]!r}"
            )


def is_page(path: str) -> bool:
    """Say whether a path is one of the dashboard's pages."""
    return path == PAGES or path.startswith(f"{PAGES}/")


def is_open(path: str) -> bool:
    """Say whether a path is answered whoever asks: probes, and what a browser needs to log in."""
    return path in {*OPEN_PATHS, "/", LOGIN_PATH} or path.startswith(f"{STATIC_PATH}/")


def is_loopback(host: str) -> bool:
    """Say whether a host name or address is this machine's own loopback."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def caller_of(request: Request) -> Caller:
    """Return who is asking."""
    caller = request.scope["tevatron.caller"]
    assert isinstance(caller, Caller)
    return caller


CurrentCaller = Annotated[Caller, Depends(caller_of)]


def _caller_with(key: ApiKey) -> Caller:
    return Caller(key_id=key.id, is_admin=key.role is KeyRole.ADMIN)


def _to_login(scope: Scope) -> Response:
    target = LOGIN_PATH
    if scope["method"] == "GET":
        query = scope["query_string"].decode("latin-1")
        target += f"?next={quote(scope['path'] + (f'?{query}' if query else ''), safe='/')}"
    return RedirectResponse(target, status_code=303)


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _bearer(authorization: str | None) -> str:
    if authorization is None:
        raise UnauthorizedError("an API key is needed: Authorization: Bearer <key>")
    scheme, _, secret = authorization.partition(" ")
    secret = secret.strip()
    if scheme.lower() != "bearer" or not secret or len(secret) > MAX_SECRET_CHARACTERS:
        raise UnauthorizedError("expected the header Authorization: Bearer <key>")
    return secret
