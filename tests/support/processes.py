"""Child processes of tests: started with a test's settings, waited for, and ended whatever happens."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import SecretStr

from tevatron.core.settings import PREFIX, Settings

ROOT = Path(__file__).parents[2]
Found = TypeVar("Found")


def settings_environment(settings: Settings) -> dict[str, str]:
    """Return the `TEVATRON_*` variables that give a child process these settings."""
    environment: dict[str, str] = {}
    for name, value in settings:
        if value is None or isinstance(value, list):
            continue
        text = value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        environment[f"{PREFIX}{name.upper()}"] = text
    return environment


def wait_for(look: Callable[[], Found | None], *, timeout_s: float = 30.0, what: str = "") -> Found:
    """Return the first truthy answer of `look`, or fail the test with the last one."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(
                f"waited {timeout_s:g} s in vain for {what or look!r}; last seen: {found!r}"
            )
        time.sleep(0.05)


@contextmanager
def running(
    argv: list[str], *, environment: Mapping[str, str], log: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process for the length of the block; what is left of it then is killed.

    Args:
        log: Gets both of its outputs, appended; the test's own standard error when unset.
    """
    output = None if log is None else log.open("ab")
    process = subprocess.Popen(
        argv,
        env=dict(environment),
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        if output is not None:
            output.close()


def python(*arguments: str) -> list[str]:
    """Return the command line of this interpreter with these arguments."""
    return [sys.executable, *arguments]
