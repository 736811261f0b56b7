"""One readable log out of the output of many services.

Each line of a service goes as it is into `<logs>/<service>.log`, and shortened, with time and service in front, to the
terminal: our services write JSON lines (core.logging), other programs write what they like.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TextIO

MAX_LOG_BYTES = 20 * 2**20
"""A service's log of more than this is renamed to .1 at the next start."""

_COLOURS = (36, 32, 33, 35, 34, 96, 92, 95)
_LEVEL_COLOURS = {"warning": 33, "error": 31, "critical": 31}
_SHOWN_BEFORE = frozenset(
    {"time", "level", "service", "logger", "message", "exception", "color_message"}
)
_QUIET_LOGGERS = frozenset({"alembic.runtime.migration"})
"""Loggers whose notes go to the file alone."""


class Console:
    """Renders lines of several services to one stream; its methods may be called from any thread."""

    def __init__(self, logs: Path, *, stream: TextIO | None = None) -> None:
        self._logs = logs
        self._stream = stream if stream is not None else sys.stderr
        self._coloured = self._stream.isatty() and not os.environ.get("NO_COLOR")
        self._colours: dict[str, int] = {}
        self._lock = threading.Lock()
        self._closed = False
        logs.mkdir(parents=True, exist_ok=True)

    def say(self, service: str, message: str, *, level: str = "info") -> None:
        """Write one line of our own."""
        clock = time.strftime("%H:%M:%S")
        self._write(
            f"{clock} {self._tag(service)} {self._paint(message, _LEVEL_COLOURS.get(level))}\n"
        )

    def follow(self, service: str, pipe: IO[bytes]) -> threading.Thread:
        """Read the service's output to its end in a thread of its own."""
        thread = threading.Thread(
            target=self._pump, args=(service, pipe), name=f"log-{service}", daemon=True
        )
        thread.start()
        return thread

    def _pump(self, service: str, pipe: IO[bytes]) -> None:
        path = self._logs / f"{service}.log"
        if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        with pipe, path.open("ab", buffering=0) as log:
            for line in pipe:
                log.write(line)
                text, level = render(line.decode("utf-8", errors="replace").rstrip("\n"))
                if text:
                    self.say(service, text, level=level)

    def _tag(self, service: str) -> str:
        with self._lock:
            colour = self._colours.setdefault(service, _COLOURS[len(self._colours) % len(_COLOURS)])
        return self._paint(f"{service:<10}", colour)

    def _paint(self, text: str, colour: int | None) -> str:
        return f"\x1b[{colour}m{text}\x1b[0m" if self._coloured and colour is not None else text

    def _write(self, text: str) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                self._stream.write(text)
                self._stream.flush()
            except (BrokenPipeError, ValueError):
                # The terminal or pipe is gone; the files still get every line, and the services must not stall.
                self._closed = True


def render(line: str) -> tuple[str, str]:
    """Shorten a service's line for people; returns the text (empty for nothing to show) and the level."""
    if not line.startswith("{"):
        return line, "info"
    try:
        entry = json.loads(line)
    except json.JSONDecodeError:
        return line, "info"
    level = str(entry.get("level", "info"))
    if level == "info" and (entry.get("logger") in _QUIET_LOGGERS or _is_routine(entry)):
        return "", level
    extra = " ".join(f"{key}={value}" for key, value in entry.items() if key not in _SHOWN_BEFORE)
    prefix = "" if level == "info" else f"{level}: "
    text = f"{prefix}{entry.get('message', '')}{'  ' + extra if extra else ''}"
    return (f"{text}\n{entry['exception']}" if "exception" in entry else text), level


def _is_routine(entry: Mapping[str, object]) -> bool:
    """Say whether the line reports a request that only looked and was answered: those who follow a job send two a second."""
    status = entry.get("status")
    return isinstance(status, int) and status < 400 and str(entry.get("message")).startswith("GET ")
