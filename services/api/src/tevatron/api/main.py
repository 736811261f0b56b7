"""`tevatron-api serve` and `tevatron-api dispatcher`: the two processes of this service."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from tevatron.core.errors import TevatronError
from tevatron.core.logging import configure_logging
from tevatron.core.settings import Settings
from tevatron.core.store.session import check_schema, make_engine, make_sessions

log = logging.getLogger(__name__)
POOL_SIZE = 8
POLLS_A_LOOK = 5
"""Dispatcher and reaper are told of new work; a look finds what a lost nudge or a dead worker left, and an idle stack
pays for each (8 % of a core at one a second)."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the processes until it is told to stop."""
    parser = argparse.ArgumentParser(prog="tevatron-api", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serving = commands.add_parser(
        "serve", help="answer HTTP on TEVATRON_API_HOST and TEVATRON_API_PORT"
    )
    serving.add_argument("--host", help="bind address, instead of TEVATRON_API_HOST")
    serving.add_argument("--port", type=int, help="port, instead of TEVATRON_API_PORT")
    commands.add_parser(
        "dispatcher", help="wake workers, settle waiting jobs, take back lost ones, send webhooks"
    )
    arguments = parser.parse_args(argv)
    try:
        settings = Settings.from_environment()
        if arguments.command == "dispatcher":
            run_dispatcher(settings)
        else:
            given = {"api_host": arguments.host, "api_port": arguments.port}
            serve(
                settings.model_copy(
                    update={name: value for name, value in given.items() if value is not None}
                )
            )
    except TevatronError as error:
        # Without the traceback, which would hide the sentence.
        log.error("%s", error)
        sys.exit(2)


def serve(settings: Settings) -> None:
    """Answer HTTP until SIGTERM; event streams end then, other requests are finished."""
    # Imported here: the dispatcher needs neither of them, nor their memory.
    import uvicorn

    from tevatron.api.app import create_app

    configure_logging("api")
    engine = make_engine(settings.require_database(), pool_size=POOL_SIZE)
    check_schema(engine)
    app = create_app(settings, engine)

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.context.closing.set()
            super().handle_exit(sig, frame)

    config = uvicorn.Config(
        app,
        host=settings.api_host,
        port=settings.api_port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn raises the signal again once it has stopped well, which would end us with its status.
        signal.signal(number, lambda *_: None)
    try:
        Server(config).run()
    finally:
        engine.dispose()


def run_dispatcher(settings: Settings) -> None:
    """Run dispatcher, reaper and the sender of webhooks side by side until SIGTERM."""
    # Imported here: the server needs no Celery.
    from tevatron.api.dispatcher import Dispatcher
    from tevatron.api.loop import Loop
    from tevatron.api.reaper import Reaper
    from tevatron.api.webhooks.sender import WebhookSender
    from tevatron.core.store.nudges import NudgeListener
    from tevatron.core.worker.celery_app import make_celery

    configure_logging("dispatcher")
    engine = make_engine(settings.require_database(), pool_size=4)
    check_schema(engine)
    sessions = make_sessions(engine)
    stopping = threading.Event()
    listener = NudgeListener(engine)
    look_s = POLLS_A_LOOK * settings.poll_s
    dispatcher = Dispatcher(
        sessions,
        make_celery(settings, producer=True),
        listener,
        republish_s=settings.republish_s,
        poll_s=look_s,
    )
    reaper = Reaper(
        sessions,
        grace_s=settings.kill_grace_s,
        max_attempts=settings.max_attempts,
        poll_s=look_s,
        stopping=stopping,
    )
    sender = WebhookSender(
        sessions,
        allow=settings.webhook_allow,
        timeout_s=settings.webhook_timeout_s,
        retry_s=settings.webhook_retry_s,
        poll_s=look_s,
        stopping=stopping,
    )
    loops = [
        Loop(name, step=part.step, pause=part.pause, stopping=stopping, retry_s=settings.poll_s)
        for name, part in (("dispatcher", dispatcher), ("reaper", reaper), ("webhooks", sender))
    ]
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    listener.close()
    engine.dispose()


if __name__ == "__main__":
    main()
