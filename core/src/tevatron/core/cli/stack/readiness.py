"""Waiting for a server of ours that was just started. Knows no server: how it is asked is the caller's."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

from tevatron.core.errors import UnavailableError

_POLL_S = 0.02


def wait_until_ready(
    name: str,
    process: subprocess.Popen[bytes] | None,
    *,
    check: Callable[[], None],
    not_yet: type[Exception],
    where: str,
    timeout_s: float,
) -> None:
    """Return when `check` passes.

    Args:
        name: Of the server, for errors.
        process: Its process; one that ended is an error at once.
        check: Asks the server, and raises `not_yet` while it does not answer.
        where: What tells more where it ended, such as its log.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        if process is None or process.poll() is not None:
            status = None if process is None else process.returncode
            raise UnavailableError(f"{name} ended with status {status} at its start ({where})")
        try:
            check()
        except not_yet as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"{name} does not answer after {timeout_s:g} s: {error}"
                ) from error
            time.sleep(_POLL_S)
        else:
            return
