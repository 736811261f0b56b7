"""The server's process: listen, load, prove, then score. It never scores with a model that is not proved.

A command that cannot be honoured ends it with status 1, and its last error line is what the scorer host stores in the
row. A checkpoint that is not what its contract says leaves it up and not ready, and `/ready` says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from functools import partial

import uvicorn

from tevatron.core.errors import TevatronError
from tevatron.core.logging import configure_logging
from tevatron.core.settings import Settings
from tevatron.scorer.served import Served, ServeOptions
from tevatron.scorer.server.app import create_app
from tevatron.scorer.server.arguments import Bind, parse
from tevatron.scorer.server.service import ServerOptions

logger = logging.getLogger(__name__)

_SHUTDOWN_S = 30
_SWITCH_S = 5e-4
"""A tenth of Python's own."""


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; return 1 where the model cannot be served as asked."""
    configure_logging("scorer")
    try:
        options, bind = parse(sys.argv[1:] if argv is None else argv)
        settings = Settings.from_environment()
        # Bound before the model is loaded: a port that is taken should not cost minutes.
        listener = _listener(bind)
    except (TevatronError, OSError) as error:
        logger.error("%s", error)
        return 1
    token = settings.scorer_token.get_secret_value() if settings.scorer_token else None
    if token is None and bind.fd is None:
        logger.warning(
            "no TEVATRON_SCORER_TOKEN is set: whoever reaches port %d may score", bind.port
        )
    app = create_app(
        partial(_load, options),
        ServerOptions(token=token, max_body_bytes=settings.max_body_bytes),
        on_failure=lambda error: server.fail(error),
    )
    server = _Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_SHUTDOWN_S,
        )
    )
    # The engine's thread launches kernels, and the GPU waits while another thread holds the interpreter.
    sys.setswitchinterval(_SWITCH_S)
    logger.info("listening on port %d", listener.getsockname()[1])
    asyncio.run(server.serve(sockets=[listener]))
    return _leave(server.failure)


def _load(options: ServeOptions) -> Served:
    # torch takes seconds to import, and a wrong flag is no reason to.
    from tevatron.scorer.loading import load

    return load(options)


class _Server(uvicorn.Server):
    """A server whose SIGTERM is an orderly end, not a death by signal."""

    failure: BaseException | None = None
    """Why the model cannot be served."""

    def fail(self, error: BaseException) -> None:
        """End, because the model cannot be served."""
        self.failure = error
        self.should_exit = True

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, and forget the signal that ended it."""
        with self.capture_signals():
            await self._serve(sockets)
            self._captured_signals.clear()


def _leave(failure: BaseException | None) -> int:
    """Say last why the model cannot be served; end even where a library is still busy loading it."""
    if failure is not None:
        known = isinstance(failure, TevatronError | OSError)
        logger.error(
            "%s",
            failure if known else "the model cannot be served",
            exc_info=None if known else failure,
        )
    status = 0 if failure is None else 1
    if any(thread.name.startswith("engine") for thread in threading.enumerate()):
        # Python would wait for the thread, which cannot be told to stop.
        logging.shutdown()
        os._exit(status)
    return status


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
