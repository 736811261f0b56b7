"""What the evaluator's commands share: what they say to people, and how they end."""

from __future__ import annotations

import sys
from collections.abc import Callable

from tevatron.core.errors import TevatronError

USER_ERROR = 2
"""Exit status of a command that could not do what it was asked."""


def run_command(command: Callable[[], None]) -> int:
    """Run a command; an error that is ours or the file system's becomes one line and status 2."""
    try:
        command()
    except (TevatronError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return USER_ERROR
    return 0


def say(text: str) -> None:
    """Write to standard output."""
    sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a remark to standard error."""
    sys.stderr.write(f"note: {text}\n")
