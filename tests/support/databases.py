"""Databases of tests: each gets one of its own name, empty and at this build's schema.

A new one costs Postgres 0.15 CPU seconds, mostly for catalogs that its first clients read cold. So a database is emptied
and renamed for the next test; one whose schema a test changed, or that somebody still holds, is dropped instead.
"""

from __future__ import annotations

import contextlib
import itertools

import psycopg
from psycopg.abc import Query
from sqlalchemy.engine import URL

# All that a change of the schema changes: tables, columns, indexes and sequences; constraints; the revision.
_SCHEMA = """
SELECT (SELECT array_agg(ROW(oid, relname, relnatts) ORDER BY oid)::text FROM pg_class
         WHERE relnamespace = 'public'::regnamespace),
       (SELECT array_agg(ROW(oid, conname) ORDER BY oid)::text FROM pg_constraint
         WHERE connamespace = 'public'::regnamespace),
       (SELECT array_agg(version_num)::text FROM alembic_version)
"""
_TABLES = """
SELECT quote_ident(relname) FROM pg_class
 WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND relname <> 'alembic_version'
"""
_END_CLIENTS = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
 WHERE datname = %s AND backend_type = 'client backend'
"""


class Databases:
    """The databases of one server; `template` is the one that they are made from."""

    def __init__(self, server: URL, template: str) -> None:
        self._server = server.set(drivername="postgresql")
        self._template = template
        self._admin = self._connect("postgres")
        self._numbers = itertools.count(1)
        self._spare: str | None = None
        with self._connect(template) as connection:
            self._schema = connection.execute(_SCHEMA).fetchone()
            tables = [table for (table,) in connection.execute(_TABLES)]
        # Without the triggers of foreign keys the order of the tables is all one.
        self._empty: Query = (
            "BEGIN; SET LOCAL session_replication_role = replica; "  # type: ignore[assignment]
            + "".join(f"DELETE FROM {table}; " for table in tables)
            + "SELECT setval(seqrelid, seqstart, false) FROM pg_sequence; COMMIT"
        )

    def take(self) -> str:
        """Return the name of an empty database that none had before."""
        name = f"test_{next(self._numbers)}"
        if self._spare is None:
            self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{self._template}"')
        else:
            # A client that a test left behind knows the old name only.
            self._execute(f'ALTER DATABASE "{self._spare}" RENAME TO "{name}"')
            self._spare = None
        return name

    def give_back(self, name: str) -> None:
        """End the database's clients; keep it, emptied, or drop it."""
        self._admin.execute(_END_CLIENTS, [name])
        if self._spare is None and self._emptied(name):
            self._spare = name
        else:
            self._execute(f'DROP DATABASE "{name}" WITH (FORCE)')

    def close(self) -> None:
        self._admin.close()

    def _emptied(self, name: str) -> bool:
        with contextlib.suppress(psycopg.errors.UndefinedTable), self._connect(name) as connection:
            if connection.execute(_SCHEMA).fetchone() == self._schema:
                connection.execute(self._empty)
                return True
        return False

    def _connect(self, name: str) -> psycopg.Connection[tuple[object, ...]]:
        url = self._server.set(database=name).render_as_string(hide_password=False)
        return psycopg.connect(url, autocommit=True)

    def _execute(self, statement: str) -> None:
        self._admin.execute(statement)  # type: ignore[arg-type]
