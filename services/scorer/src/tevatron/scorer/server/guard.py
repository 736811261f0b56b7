"""What stands before every route: the bearer token, and the limit on a body. Pure ASGI, so no route can be forgotten."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tevatron.scorer.server.problems import problem

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Probes come without a token, and learn whether the server works, and why it does not."""


class _TooLargeError(Exception):
    """The body grew over the limit while it was read."""


class Guard:
    """Let through what carries the token and is not too large."""

    def __init__(self, app: ASGIApp, *, token: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 401, 413, or pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if not self._may_pass(scope["path"], headers):
            refusal = problem(
                401,
                "expected the header Authorization: Bearer <token of this scorer>",
                code="unauthorized",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await refusal(scope, receive, send)
            return
        declared = headers.get("content-length", "")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            await self._refuse_size(scope, receive, send)
            return
        await self._with_limit(scope, receive, send)

    def _may_pass(self, path: str, headers: Headers) -> bool:
        if self._expected is None or path in OPEN_PATHS:
            return True
        given = headers.get("authorization", "").encode("latin-1", "replace")
        return hmac.compare_digest(given, self._expected)

    async def _with_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        total, started = 0, False

        async def counted() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self._max_body_bytes:
                raise _TooLargeError
            return message

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, counted, noted)
        except _TooLargeError:
            if started:
                raise
            await self._refuse_size(scope, receive, send)

    async def _refuse_size(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = problem(
            413,
            f"the body is larger than {self._max_body_bytes} bytes; send fewer candidates in a request",
            code="too_large",
            headers={"Connection": "close"},
        )
        await refusal(scope, receive, send)
