"""Identifiers with a prefix that names the kind, sortable by time of creation."""

from __future__ import annotations

import secrets
import time


def new_id(prefix: str) -> str:
    """Return e.g. `job_019ad3f2c4b1a7d2e3f4a5b6`: 12 hex digits of milliseconds, 12 random ones."""
    return f"{prefix}_{time.time_ns() // 1_000_000:012x}{secrets.token_hex(6)}"
