"""Structured logs: one JSON object a line, with ids bound to the process or to a block; plain lines for a terminal."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_bound: ContextVar[dict[str, str | int]] = ContextVar("tevatron_log_context", default={})  # noqa: B039  never mutated

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Render a record as one JSON line: time, level, service, logger, message, ids, `extra` fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without a newline."""
        entry: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_bound.get(),
        }
        entry.update({key: value for key, value in vars(record).items() if key not in _STANDARD})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure_logging(service: str, *, level: int = logging.INFO) -> None:
    """Send this process's logs to standard error: JSON lines under the name of its service, or plain ones to a terminal."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(plain if sys.stderr.isatty() else JsonFormatter(service))
    logging.basicConfig(level=level, handlers=[handler], force=True)


@contextmanager
def bound(**ids: str | int) -> Iterator[None]:
    """Add ids (job_id, attempt, rank) to every record within the block."""
    token = _bound.set({**_bound.get(), **ids})
    try:
        yield
    finally:
        _bound.reset(token)
