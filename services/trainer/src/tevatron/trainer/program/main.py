"""Entry of a rank: reads the flags, trains, and turns whatever goes wrong into an event and an exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from pydantic import JsonValue

from tevatron.core.errors import ConfigError, JobError, TevatronError
from tevatron.core.logging import bound, configure_logging
from tevatron.core.process import die_with_parent
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.flags import Backend, Parsed, help_text, parse
from tevatron.trainer.program.settings import RankEnvironment

logger = logging.getLogger(__name__)

FAILED, BAD_FLAGS = 1, 2


def main(
    argv: Sequence[str] | None = None,
    *,
    driver: str = "tevatron.reranker.driver.train",
    backend: Backend = "hf",
    defaults: Mapping[str, JsonValue] | None = None,
) -> int:
    """Run one rank of a driver; return its exit code. `driver` is its module, `defaults` are its own."""
    environment = RankEnvironment.read()
    if environment.attempt is not None:
        die_with_parent()
    words = list(sys.argv[1:] if argv is None else argv)
    if "--help" in words or "-h" in words:
        sys.stdout.write(help_text(driver, backend=backend, defaults=defaults))
        return 0
    configure_logging("trainer")
    with bound(rank=environment.rank):
        try:
            parsed = parse(words, backend=backend, defaults=defaults)
        except ConfigError as error:
            logger.error("%s", error)
            return BAD_FLAGS
        return _train(parsed, environment)


def leave(status: int) -> NoReturn:
    """End this process with that status; after a failure at once, since groups with a lost rank are waited for at exit."""
    if status != 0:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    sys.exit(status)


def _train(parsed: Parsed, environment: RankEnvironment) -> int:
    # Here and not at the top: torch takes seconds to import, and wrong flags should not wait for it.
    from tevatron.trainer.program.failures import reason_of
    from tevatron.trainer.program.train import train_with, write_config

    run = parsed.run
    run.output_dir.mkdir(parents=True, exist_ok=True)
    events = EventWriter(run.output_dir, rank=environment.rank)
    try:
        if environment.rank == 0:
            for warning in parsed.warnings:
                logger.warning("%s", warning)
                events.log("warning", warning)
            if not parsed.from_config:
                write_config(run)
        train_with(run, environment, events)
    except Exception as error:
        phase = error.phase if isinstance(error, JobError) else None
        # A user's mistake says what, expected and got; where in our code it was found helps nobody.
        if isinstance(error, TevatronError):
            logger.error("%s", error)
        else:
            logger.exception("the run failed")
        events.failed(reason_of(error), str(error) or type(error).__name__, phase=phase)
        return FAILED
    return 0
