"""What a request may look like before anything reads it: media type and size of its body.

A pure ASGI middleware, so that a chunked body is counted as it comes. Knows no key and no route, only the three shapes
of body that the API takes: JSON, the content of a dataset, and a form of the dashboard.
"""

from __future__ import annotations

import re

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tevatron.api.problems import RefusedError, render
from tevatron.api.security import is_page

CONTENT_PATH = re.compile(r"^/v1/datasets/[^/]+/content$")
CONTENT_TYPES = frozenset(
    {
        "application/octet-stream",
        "application/x-ndjson",
        "application/jsonl",
        "application/gzip",
        "application/zstd",
        "application/zip",
        "text/tab-separated-values",
    }
)
JSON_TYPES = frozenset({"application/json"})
FORM_TYPES = frozenset({"application/x-www-form-urlencoded"})
BODY_METHODS = frozenset({"POST", "PUT", "PATCH", "DELETE"})
DRAIN_S = 2.0
DRAIN_BYTES = 256 * 2**20


class BodyGuard:
    """Refuse a body of another media type (415) or over the limit (413)."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int, max_upload_bytes: int) -> None:
        self.app = app
        self.max_body_bytes = max_body_bytes
        self.max_upload_bytes = max_upload_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the headers, then count what comes."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit, media_types = self.max_body_bytes, JSON_TYPES
        if CONTENT_PATH.fullmatch(scope["path"]):
            limit, media_types = self.max_upload_bytes, CONTENT_TYPES
        elif is_page(scope["path"]):
            media_types = FORM_TYPES
        body = _Body(receive, send, Headers(scope=scope), limit)
        refusal = body.refusal(scope["method"], media_types)
        if refusal is None:
            await self.app(scope, body.receive, body.send)
            return
        response = render(
            refusal.status_code,
            refusal.detail,
            code=refusal.code,
            request_id=scope["tevatron.request_id"],
        )
        await response(scope, body.receive, body.send)


class _Body:
    """Counts one request's body, and reads the rest away before an early answer.

    A client that is still sending would otherwise see a broken connection in place of the answer.
    """

    def __init__(self, receive: Receive, send: Send, headers: Headers, limit: int) -> None:
        self._receive = receive
        self._send = send
        self._limit = limit
        self._waits_for_continue = "expect" in headers
        self._media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        length = headers.get("content-length", "")
        self._declared = int(length) if length.isdecimal() and len(length) < 20 else None
        self._has_body = "transfer-encoding" in headers or self._declared not in (None, 0)
        self._seen = 0
        self._complete = not self._has_body

    def refusal(self, method: str, media_types: frozenset[str]) -> RefusedError | None:
        """Return why the headers alone are enough to refuse this body."""
        if method not in BODY_METHODS or not self._has_body:
            return None
        if self._media_type not in media_types:
            expected = " or ".join(sorted(media_types))
            got = self._media_type or "none"
            return RefusedError(
                415,
                f"expected Content-Type {expected}, got {got[:100]}",
                code="unsupported_media_type",
            )
        if self._declared is not None and self._declared > self._limit:
            return self._too_large()
        return None

    async def receive(self) -> Message:
        """Pass a message on, or refuse once there is too much."""
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            self._complete = not message.get("more_body", False)
            if self._seen > self._limit:
                raise self._too_large()
        return message

    async def send(self, message: Message) -> None:
        """Pass a message on, after what is left of the body where the answer comes early."""
        if (
            message["type"] == "http.response.start"
            and not self._complete
            and not self._waits_for_continue
        ):
            await self._drain()
        await self._send(message)

    async def _drain(self) -> None:
        drained = 0
        with anyio.move_on_after(DRAIN_S):
            while not self._complete and drained < DRAIN_BYTES:
                message = await self._receive()
                if message["type"] != "http.request":
                    return
                drained += len(message.get("body", b""))
                self._complete = not message.get("more_body", False)

    def _too_large(self) -> RefusedError:
        return RefusedError(
            413, f"the body is over the limit of {self._limit} bytes", code="too_large"
        )
