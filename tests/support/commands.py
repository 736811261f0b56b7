"""Commands run in the test's own process, which has imported them already: what they say, and their status."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from unittest import mock


class Said(NamedTuple):
    stdout: str
    stderr: str


def call(
    main: Callable[[Sequence[str]], int],
    words: Sequence[object],
    *,
    environment: Mapping[str, str] | None = None,
    check: int = 0,
) -> Said:
    """Run `main` with these words and variables; its status must be `check`."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main([str(word) for word in words])
    assert status == check, err.getvalue()
    return Said(out.getvalue(), err.getvalue())
