"""A database that goes away in the middle of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy import make_url


@contextmanager
def database_away(url: str) -> Iterator[None]:
    """Refuse and end every connection to the test's database."""
    name = make_url(url).database
    server = make_url(url).set(drivername="postgresql", database="postgres")
    with psycopg.connect(
        server.render_as_string(hide_password=False), autocommit=True
    ) as connection:
        connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')  # type: ignore[arg-type]
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )
        try:
            yield
        finally:
            connection.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')  # type: ignore[arg-type]
