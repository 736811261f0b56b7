"""The end of an attempt's log file, read from the run folder and from nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

from tevatron.core.contracts.run import log_name
from tevatron.core.errors import NotFoundError


def read_tail(data: Path, *, job_id: str, attempt: int, max_bytes: int) -> bytes:
    """Return the last `max_bytes` of the log, from the start of a line on."""
    folder = data / "runs" / job_id
    try:
        # A training program owns this folder: a link in place of its log must not be followed.
        descriptor = os.open(
            folder / log_name(attempt), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        )
    except OSError as error:
        raise NotFoundError(f"{job_id} has no log of attempt {attempt}") from error
    with os.fdopen(descriptor, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max_bytes))
        tail = file.read(max_bytes)
    if size > max_bytes:
        tail = tail.partition(b"\n")[2] or tail
    return tail
