"""What the commands that use scorers share: their flags, and what they say of a pool's progress."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.evaluator.console import note
from tevatron.evaluator.pool import Backend, PoolOptions

MOST_PAIRS = 10_000
"""More in one request no scorer takes."""


def add_backend_flags(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add `--backends` and what goes with them."""
    parser.add_argument(
        "--backends",
        nargs="+",
        metavar="URL",
        required=required,
        help="scorers of one checkpoint, such as http://127.0.0.1:8100; TEVATRON_SCORER_TOKEN is sent to each",
    )
    parser.add_argument(
        "--max_concurrency", type=int, help="requests in flight at all backends together"
    )
    parser.add_argument(
        "--query_prefix", help="sent along: a scorer refuses another than its contract's"
    )
    parser.add_argument("--passage_prefix", help="sent along as well")


def backends_of(urls: Sequence[str]) -> list[Backend]:
    """Return the backends; what is no http URL, or stands twice, is an error."""
    secret = Settings.from_environment().scorer_token
    token = None if secret is None else secret.get_secret_value()
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                f"--backends: expected URLs such as http://127.0.0.1:8100, got '{url}'"
            )
    plain = [url.rstrip("/") for url in urls]
    if twice := sorted({url for url in plain if plain.count(url) > 1}):
        raise ConfigError(f"--backends: '{twice[0]}' is given twice")
    return [Backend(url=url, token=token) for url in plain]


def pool_options(arguments: argparse.Namespace, *, chunk_size: int) -> PoolOptions:
    """Return how the pool behaves under these flags."""
    if not 1 <= chunk_size <= MOST_PAIRS:
        raise ConfigError(f"--chunk_size must be between 1 and {MOST_PAIRS}, got {chunk_size}")
    if arguments.max_concurrency is not None and arguments.max_concurrency < 1:
        raise ConfigError(f"--max_concurrency must be at least 1, got {arguments.max_concurrency}")
    return PoolOptions(
        max_chunk=chunk_size,
        max_in_flight=arguments.max_concurrency,
        query_prefix=arguments.query_prefix,
        passage_prefix=arguments.passage_prefix,
    )


class Progress:
    """Says now and then how far a long work is, how fast, and how long it will take."""

    def __init__(self, total: int, unit: str, *, every_s: float = 10.0) -> None:
        self._total, self._unit, self._every_s = total, unit, every_s
        self._started = self._said = time.monotonic()
        self._first: int | None = None

    def __call__(self, done: int) -> None:
        """Note that so many are done; what was done before the first call costs nothing."""
        now = time.monotonic()
        if self._first is None:
            self._first, self._started = done, now
        if now - self._said < self._every_s:
            return
        self._said = now
        speed = (done - self._first) / max(now - self._started, 1e-9)
        left = f", {_duration((self._total - done) / speed)} left" if speed > 0 else ""
        note(
            f"{done} of {self._total} {self._unit} ({done / max(self._total, 1):.0%}), "
            f"{speed:.1f} {self._unit}/s{left}"
        )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
