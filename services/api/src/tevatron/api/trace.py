"""One id, one log line and one measurement for every request. Knows no route and no key."""

from __future__ import annotations

import logging
import re
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tevatron.api.metrics import HttpMetrics
from tevatron.core.ids import new_id
from tevatron.core.logging import bound

log = logging.getLogger(__name__)
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
QUIET_PATHS = frozenset({"/healthz", "/readyz", "/metrics"})
"""Probes and scrapes would fill the log."""


class RequestTrace:
    """Outermost middleware: takes the client's X-Request-ID or makes one, and answers with it."""

    def __init__(self, app: ASGIApp, *, metrics: HttpMetrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request with its id bound to the log."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else new_id("req")
        scope["tevatron.request_id"] = request_id
        started = time.monotonic()
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = request_id
            await send(message)

        with bound(request_id=request_id):
            try:
                await self.app(scope, receive, send_with_id)
            finally:
                self._record(scope, status, time.monotonic() - started)

    def _record(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "none")
        self.metrics.observe(method=scope["method"], route=route, status=status, seconds=seconds)
        if scope["path"] not in QUIET_PATHS or status >= 400:
            log.info(
                "%s %s -> %d",
                scope["method"],
                scope["path"],
                status,
                extra={"status": status, "duration_ms": round(seconds * 1000, 1)},
            )
