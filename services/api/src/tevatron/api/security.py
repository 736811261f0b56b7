"""Who is asking: API keys, and the one case without them, a loopback address with a loopback Host header.

A pure ASGI middleware in front of the router, so that no route can be forgotten. Endpoints take the `Caller`.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from sqlalchemy.exc import InterfaceError, OperationalError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from tevatron.api.problems import render
from tevatron.core.errors import ForbiddenError, TevatronError, UnauthorizedError
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.models import KeyRole
from tevatron.core.store.repository import EveryKey, KeyScope
from tevatron.core.store.session import Sessions

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Probes come without a key, and learn nothing but whether the service works."""
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
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self.app(scope, receive, send)
            return
        try:
            caller = await run_in_threadpool(self._caller, Headers(scope=scope))
        except TevatronError as error:
            status, detail, code = error.status_code, str(error), error.code
        except (OperationalError, InterfaceError):
            status, detail, code = 503, "the database does not answer; try again", "unavailable"
        else:
            scope["tevatron.caller"] = caller
            await self.app(scope, receive, send)
            return
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
            return Caller(key_id=key.id, is_admin=key.role is KeyRole.ADMIN)

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
