"""One child server: how it is started, what it may know, what it last said, and how it ends.

The child gets our environment without its secrets (`core/environment.py`), and a token of its own. It listens on a
socket that the host has bound, so no port is ever free for somebody else.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tevatron.core.environment import child_environment
from tevatron.core.process import guarded

_LAST_LINES = 20
SERVER = ("-P", "-m", "tevatron.scorer.server.main")
"""The server, to the interpreter; -P: a folder `tevatron` in the working directory must not hide ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Where children of one slot listen, and where others reach them."""

    bind_host: str
    port: int
    """0 for a free one."""
    advertised_host: str


class Child:
    """A running server. Made in the host's main thread: the child dies with the thread that starts it."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        bound: Bound,
        devices: str | None,
        python: str = sys.executable,
        allow_hub: bool = False,
    ) -> None:
        self.token = secrets.token_urlsafe(32)
        self.started_at = time.monotonic()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._error: str | None = None
        self._kill_at: float | None = None
        with _listener(bound) as listener:
            port = listener.getsockname()[1]
            shown = (
                f"[{bound.advertised_host}]"
                if ":" in bound.advertised_host
                else bound.advertised_host
            )
            self.url = f"http://{shown}:{port}"
            self.local_url = f"http://127.0.0.1:{port}"
            self._process = subprocess.Popen(
                guarded([python, *SERVER, *arguments, "--fd", str(listener.fileno())]),
                env={
                    **child_environment(os.environ, devices=devices, allow_hub=allow_hub),
                    "TEVATRON_SCORER_TOKEN": self.token,
                },
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(listener.fileno(),),
            )
        self._reader = threading.Thread(target=self._relay, daemon=True, name=f"child-{self.pid}")
        self._reader.start()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def exit_status(self) -> int | None:
        """Return the exit status, negative for a signal, None while it runs."""
        return self._process.poll()

    def stop(self, *, grace_s: float) -> None:
        """Ask it to end; `exit_status` kills it once the grace is over. Repeating it does no harm."""
        if self._kill_at is None and self.exit_status() is None:
            self._process.terminate()
            self._kill_at = time.monotonic() + grace_s

    def has_ended(self) -> bool:
        """Say whether it has ended; kills it where its grace is over."""
        if (
            self.exit_status() is None
            and self._kill_at is not None
            and time.monotonic() >= self._kill_at
        ):
            self._process.kill()
        return self.exit_status() is not None

    def kill(self) -> None:
        """End it now, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    def last_error(self) -> str:
        """Return its last error line, or its last words, with how it ended."""
        self._reader.join(timeout=2)
        status = self.exit_status()
        ended = "" if status is None else f" ({_ending(status)})"
        if self._error is not None:
            return f"{self._error}{ended}"
        return f"{self.last_words() or 'it said nothing'}{ended}"

    def last_words(self) -> str:
        """Return its last lines, whatever they are."""
        return " | ".join(self._lines)[-1000:]

    def _relay(self) -> None:
        """Pass its log on to our standard error, and keep the last error."""
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for raw in output:
                line = raw.decode("utf-8", "replace").rstrip()
                if not line:
                    continue
                sys.stderr.write(line + "\n")
                sys.stderr.flush()
                self._lines.append(line)
                self._error = _error_of(line) or self._error


def _listener(bound: Bound) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        # Bound, not listening: until the child has proved its model, a connection is refused.
        listener.bind((bound.bind_host, bound.port))
    except OSError:
        listener.close()
        raise
    return listener


def _error_of(line: str) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if not isinstance(entry, dict) or entry.get("level") not in {"error", "critical"}:
        return None
    message = str(entry.get("message"))
    trace = str(entry.get("exception") or "").strip().splitlines()
    return f"{message}: {trace[-1]}" if trace else message


def _ending(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
