"""The server's process: load, prove, then listen. It never listens with a model that is not proved.

Its last error line is what the scorer host stores in the row, so every way to fail ends with one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Sequence

import uvicorn

from tevatron.core.errors import TevatronError
from tevatron.core.logging import configure_logging
from tevatron.core.settings import Settings
from tevatron.scorer.server.app import ServerOptions, create_app
from tevatron.scorer.server.arguments import Bind, parse

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; return 1 where the model cannot be served as asked."""
    configure_logging("scorer")
    try:
        options, bind = parse(sys.argv[1:] if argv is None else argv)
        settings = Settings.from_environment()
        # Bound before the model is loaded: a port that is taken should not cost minutes.
        listener = _listener(bind)
        # torch takes seconds to import, and a wrong flag is no reason to.
        from tevatron.scorer.loading import load

        served = load(options)
    except (TevatronError, OSError) as error:
        logger.error("%s", error)
        return 1
    except Exception:
        # The process border: the libraries below raise anything, down to errors of the GPU driver.
        logger.exception("the model cannot be served")
        return 1
    token = settings.scorer_token.get_secret_value() if settings.scorer_token else None
    if token is None and bind.fd is None:
        logger.warning(
            "no TEVATRON_SCORER_TOKEN is set: whoever reaches port %d may score", bind.port
        )
    app = create_app(served, ServerOptions(token=token, max_body_bytes=settings.max_body_bytes))
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    logger.info(
        "serving %s on port %d: %s",
        options.model.name,
        listener.getsockname()[1],
        served.info.model_dump_json(),
    )
    asyncio.run(_Server(config).serve(sockets=[listener]))
    return 0


class _Server(uvicorn.Server):
    """A server whose SIGTERM is an orderly end, not a death by signal."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, and forget the signal that ended it."""
        with self.capture_signals():
            await self._serve(sockets)
            self._captured_signals.clear()


def _listener(bind: Bind) -> socket.socket:
    if bind.fd is not None:
        return socket.socket(fileno=bind.fd)
    family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((bind.host, bind.port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {bind.host}:{bind.port}: {error.strerror}") from error
    return listener


if __name__ == "__main__":
    sys.exit(main())
