"""Postgres tells the dispatcher that there is a job, so that it need not wait for its next look.

A nudge is sent with the transaction that queues a job or ends one, and may be lost: the dispatcher looks now and then
anyway.
"""

from __future__ import annotations

import psycopg
from sqlalchemy import Connection, Engine, text
from sqlalchemy.orm import Session

CHANNEL = "tevatron_jobs"


def nudge(session: Session) -> None:
    """Wake the dispatcher when this transaction commits."""
    session.execute(text(f"NOTIFY {CHANNEL}"))


class NudgeListener:
    """Waits for nudges on a connection of its own; an error of the database is the caller's to handle."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None

    def wait(self, timeout_s: float) -> bool:
        """Return whether a nudge came within the time; several count as one."""
        if self._connection is None:
            self._connection = self._engine.connect().execution_options(
                isolation_level="AUTOCOMMIT"
            )
            self._connection.execute(text(f"LISTEN {CHANNEL}"))
        driver = self._connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        return any(True for _ in driver.notifies(timeout=timeout_s, stop_after=1))

    def close(self) -> None:
        """Give the connection up; the next wait opens another."""
        connection, self._connection = self._connection, None
        if connection is not None:
            # Not back into the pool, where it would go on listening.
            connection.invalidate()
            connection.close()
