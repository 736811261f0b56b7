"""`tevatron up`: the whole stack as children of one foreground process.

Owns the order of start and stop, restarts with back-off, the lock on the home, and `run/stack.json`. Every child is
killed by the kernel when this process dies, so nothing is left behind even after kill -9. All children are started by
the main thread, which is the one that the kernel watches. Knows our services by their command lines only.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tevatron.core.cli.stack.console import Console
from tevatron.core.cli.stack.postgres import EmbeddedPostgres
from tevatron.core.cli.stack.valkey import HOST, EmbeddedValkey, free_port
from tevatron.core.errors import ConfigError, ConflictError, UnavailableError
from tevatron.core.process import guarded
from tevatron.core.settings import Settings

READY_TIMEOUT_S = 120.0
BACKOFF_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
HEALTHY_S = 60.0
"""A service that ran this long is restarted at once when it dies."""
EXIT_GRACE_S = 10.0
"""On top of `stop_grace_s`, which the workers give their job."""
_TICK_S = 0.2

WORKERS: dict[str, Sequence[str]] = {
    "trainer": ("tevatron.trainer.main", "worker"),
    "evaluator": ("tevatron.evaluator.main", "worker"),
    "scorer": ("tevatron.scorer.main", "host"),
}
FRONT: dict[str, Sequence[str]] = {
    "api": ("tevatron.api.main", "serve"),
    "dispatcher": ("tevatron.api.main", "dispatcher"),
}


@dataclass(slots=True, kw_only=True)
class StackOptions:
    """What `tevatron up` was told."""

    port: int | None = None
    """Loopback port of the API; a free one when unset."""
    roots: list[Path] = field(default_factory=list)
    """Folders from which models and datasets may be registered by path."""
    allow_hub: bool = False
    fsync: bool = True


@dataclass(slots=True)
class Child:
    """One supervised process, and how to start it again."""

    name: str
    spawn: Callable[[], subprocess.Popen[bytes]]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    failures: int = 0
    restart_at: float | None = None


class Supervisor:
    """Runs the stack on one home until it is told to stop."""

    def __init__(self, settings: Settings, options: StackOptions, console: Console) -> None:
        self._settings = settings
        self._options = options
        self._console = console
        self._run_dir = settings.home / "run"
        self._postgres = EmbeddedPostgres(settings.home / "postgres", fsync=options.fsync)
        self._valkey = EmbeddedValkey(settings.home / "valkey")
        self._port = options.port
        self._children: dict[str, Child] = {}
        self._stop_signals = 0

    def run(self) -> int:
        """Start everything, keep it running, stop it in order; returns the exit status."""
        lock = self._lock_home()
        try:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._on_signal)
            # Under nohup it is ignored, and stays so.
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                signal.signal(signal.SIGHUP, self._on_signal)
            try:
                self._start()
                while not self._stop_signals:
                    self._tick()
                    time.sleep(_TICK_S)
            finally:
                self._stop()
        finally:
            os.close(lock)
        return 0

    # Start

    def _lock_home(self) -> int:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(
            self._run_dir / "stack.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 100).decode() or "unknown"
            os.close(descriptor)
            raise ConflictError(
                f"another `tevatron up` (process {owner}) runs on {self._settings.home}; stop it, or give --home"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        return descriptor

    def _start(self) -> None:
        self._stack_file.unlink(missing_ok=True)
        if self._options.port is not None:
            _check_port(self._options.port)
        self._console.say("up", f"home {self._settings.home}")
        self._start_postgres()
        self._start_valkey()
        self._migrate()
        for name, command in {**FRONT, **WORKERS}.items():
            self._add(name, command)
        self._wait_ready()
        if not self._stop_signals:
            self._console.say("up", f"ready at {self.url}, the dashboard at {self.url}/ui")

    def _start_postgres(self) -> None:
        self._postgres.prepare()
        child = Child("postgres", lambda: self._respawn_postgres())
        self._children[child.name] = child
        self._spawn(child)
        while True:
            try:
                self._postgres.wait_ready()
            except UnavailableError:
                # After a kill -9 the old server's children may hold its shared memory for a moment.
                if child.failures >= len(BACKOFF_S) - 2 or self._stop_signals:
                    raise
                time.sleep(BACKOFF_S[child.failures])
                child.failures += 1
                self._spawn(child)
            else:
                child.failures = 0
                return

    def _respawn_postgres(self) -> subprocess.Popen[bytes]:
        self._postgres.prepare()
        return self._postgres.spawn(output=subprocess.PIPE)

    def _start_valkey(self) -> None:
        self._valkey.start(output=subprocess.PIPE)
        child = Child("valkey", lambda: self._valkey.spawn(output=subprocess.PIPE))
        self._children[child.name] = child
        assert self._valkey.process is not None
        self._adopt(child, self._valkey.process)

    def _migrate(self) -> None:
        process = self._popen([sys.executable, "-P", "-m", "tevatron.core.cli.main", "migrate"])
        assert process.stdout is not None
        thread = self._console.follow("migrate", process.stdout)
        status = process.wait()
        thread.join(timeout=5)
        if status != 0:
            raise UnavailableError(f"the migration of the database ended with status {status}")

    def _add(self, name: str, command: Sequence[str]) -> None:
        argv = [sys.executable, "-P", "-m", *command]
        child = Child(name, lambda: self._popen(argv))
        self._children[name] = child
        self._spawn(child)

    def _popen(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            guarded(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment(),
            # Ctrl-C in the terminal is for us; we stop them in order.
            start_new_session=True,
        )

    def _spawn(self, child: Child) -> None:
        self._adopt(child, child.spawn())

    def _adopt(self, child: Child, process: subprocess.Popen[bytes]) -> None:
        child.process, child.started_at, child.restart_at = process, time.monotonic(), None
        assert process.stdout is not None
        self._console.follow(child.name, process.stdout)

    def _environment(self) -> dict[str, str]:
        settings, roots = self._settings, os.pathsep.join(str(root) for root in self._options.roots)
        if self._port is None:
            self._port = free_port()
        ours = {
            "HOME": str(settings.home),
            "DATA": str(settings.data),
            "URL": self.url,
            "DATABASE_URL": self._postgres.url,
            "BROKER_URL": self._valkey.url,
            "API_HOST": HOST,
            "API_PORT": str(self._port),
            "ADVERTISE_URL": f"http://{HOST}",
            "DATASET_ROOTS": roots,
            "MODEL_ROOTS": roots,
            "ALLOW_HUB": str(self._options.allow_hub).lower(),
        }
        return {
            # On one machine a worker's death is seen at once; nobody waits a minute for a lost job.
            "TEVATRON_LEASE_S": "30",
            "TEVATRON_HEARTBEAT_S": "5",
            # A trainer and a scorer share the cores: threads that spin while they wait triple the time of both.
            "OMP_WAIT_POLICY": "PASSIVE",
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            # Celery's remark about root, which a laptop's container often is.
            "PYTHONWARNINGS": "ignore:You're running the worker with superuser privileges",
            **{f"TEVATRON_{key}": text for key, text in ours.items()},
        }

    @property
    def url(self) -> str:
        """Return where the API answers."""
        return f"http://{HOST}:{self._port}"

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._stop_signals:
            if _answers(f"{self.url}/readyz"):
                self._write_stack_file()
                return
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"the API at {self.url} is not ready after {READY_TIMEOUT_S:g} s; "
                    f"its log: {self._settings.home / 'logs' / 'api.log'}"
                )
            api = self._children["api"]
            if self._options.port is None and _ended(api) and not _is_free(self._port or 0):
                # Somebody took the port between our look and the API's bind: all move to another one.
                self._port = free_port()
            self._tick()
            time.sleep(0.1)

    # Keep running

    def _tick(self) -> None:
        now, changed = time.monotonic(), False
        for child in self._children.values():
            if child.process is None:
                continue
            if child.restart_at is None and child.process.poll() is not None:
                self._note_death(child, now)
            if child.restart_at is not None and now >= child.restart_at:
                self._spawn(child)
                changed = True
        if changed and self._stack_file.exists():
            self._write_stack_file()

    def _note_death(self, child: Child, now: float) -> None:
        assert child.process is not None
        child.failures = 0 if now - child.started_at > HEALTHY_S else child.failures
        delay = BACKOFF_S[min(child.failures, len(BACKOFF_S) - 1)]
        child.failures += 1
        child.restart_at = now + delay
        how = _how_it_ended(child.process.returncode)
        self._console.say(
            "up", f"{child.name} {how}; starting it again in {delay:g} s", level="warning"
        )

    @property
    def _stack_file(self) -> Path:
        return self._run_dir / "stack.json"

    def _write_stack_file(self) -> None:
        content = {
            "url": self.url,
            "home": str(self._settings.home),
            "data": str(self._settings.data),
            "database_url": self._postgres.url,
            "broker_url": self._valkey.url,
            "pid": os.getpid(),
            "pids": {
                name: child.process.pid for name, child in self._children.items() if child.process
            },
        }
        temporary = self._stack_file.with_suffix(".tmp")
        temporary.unlink(missing_ok=True)
        with os.fdopen(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
        ) as file:
            json.dump(content, file, indent=1)
        temporary.replace(self._stack_file)

    # Stop

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop_signals += 1

    def _stop(self) -> None:
        self._console.say("up", "stopping; once more to hurry")
        self._stack_file.unlink(missing_ok=True)
        self._end(
            [name for name in WORKERS if name in self._children],
            self._settings.stop_grace_s + EXIT_GRACE_S,
        )
        self._end([name for name in FRONT if name in self._children], EXIT_GRACE_S)
        self._valkey.stop()
        self._postgres.stop()
        self._console.say("up", "stopped")

    def _end(self, names: Sequence[str], grace_s: float) -> None:
        processes = [
            child.process for name in names if (child := self._children[name]).process is not None
        ]
        for process in processes:
            if process.poll() is None:
                process.terminate()
        heard, deadline = self._stop_signals, time.monotonic() + grace_s
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or self._stop_signals > max(heard, 1):
                break
            time.sleep(0.05)
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _ended(child: Child) -> bool:
    return child.process is None or child.process.poll() is not None


def _how_it_ended(status: int) -> str:
    return (
        f"was killed by {signal.Signals(-status).name}"
        if status < 0
        else f"ended with status {status}"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do: a port whose old connections linger is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


def _check_port(port: int) -> None:
    if not _is_free(port):
        raise ConfigError(
            f"port {port} of {HOST} is taken or not allowed; leave --port out to get a free one"
        )


def _answers(url: str) -> bool:
    try:
        # Without a proxy: it is our own machine.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            url, timeout=2
        ) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
