"""Whether the parts that a service works with answer: `python -m tevatron.core.worker.probe`, for probes of containers.

A worker, the dispatcher and a scorer host open no port. They end when they cannot go on, which any supervisor sees;
what it cannot see is whether database and broker can be reached from where they run. Imports little: it runs often.
"""

from __future__ import annotations

import sys

import psycopg
import redis

from tevatron.core.errors import TevatronError
from tevatron.core.settings import Settings

TIMEOUT_S = 3


def check(settings: Settings) -> None:
    """Ask the database, and the broker where one is set; raises what went wrong."""
    # SQLAlchemy's form of the URL names the driver too.
    url = settings.require_database().replace("postgresql+psycopg://", "postgresql://", 1)
    with psycopg.connect(url, connect_timeout=TIMEOUT_S) as connection:
        connection.execute("SELECT 1")
    # A scorer host has none.
    if settings.broker_url is not None:
        with redis.Redis.from_url(
            settings.require_broker(), socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
        ) as client:
            client.ping()


def main() -> int:
    """Return 0 where all answer, 1 with a sentence on standard error where one does not."""
    try:
        check(Settings.from_environment())
    except (TevatronError, psycopg.Error, redis.RedisError) as error:
        sys.stderr.write(f"not ready: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
