"""Engine, sessions and the schema's revision. Knows no table.

A session is one transaction: `with sessions.begin() as session: ...`. Nothing else commits.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, inspect, text
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.pool import NullPool

from tevatron.core.errors import ConfigError

Sessions = sessionmaker[Session]

MIGRATIONS = Path(__file__).parent / "migrations"
_MIGRATION_LOCK = 0x7E7A7
"""Key of the advisory lock: two services that start at once migrate one after the other."""

# Without these a cut network line blocks a heartbeat for as long as the kernel retransmits (15 minutes).
_CONNECT = {
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "application_name": "tevatron",
    "options": "-c timezone=UTC -c statement_timeout=60000 -c idle_in_transaction_session_timeout=120000",
}


def make_engine(url: str, *, pool_size: int = 5) -> Engine:
    """Return an engine on Postgres; a pooled connection is tested before use."""
    return create_engine(
        url, pool_pre_ping=True, pool_size=pool_size, pool_timeout=10, connect_args=_CONNECT
    )


def make_sessions(engine: Engine) -> Sessions:
    """Return a session factory whose rows stay readable after the transaction."""
    return sessionmaker(engine, expire_on_commit=False)


def migrate(url: str) -> None:
    """Bring the schema up to this build's revision, in one transaction, one process at a time."""
    engine = create_engine(url, poolclass=NullPool, connect_args={"connect_timeout": "5"})
    try:
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            config = alembic_config()
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    finally:
        engine.dispose()


def check_schema(engine: Engine) -> None:
    """Refuse a database whose schema is not this build's."""
    expected = ScriptDirectory.from_config(alembic_config()).get_current_head()
    with engine.connect() as connection:
        found = (
            connection.scalar(text("SELECT version_num FROM alembic_version"))
            if inspect(connection).has_table("alembic_version")
            else None
        )
    if found != expected:
        raise ConfigError(
            f"the database's schema is at revision {found or 'none'}, this build needs {expected}: "
            "run `tevatron migrate`, or start services of the same version"
        )


def alembic_config() -> Config:
    """Return Alembic's configuration for the migrations inside this package."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
