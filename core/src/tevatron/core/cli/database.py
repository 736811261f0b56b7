"""Where the database is, for the few commands that an operator runs beside it."""

from __future__ import annotations

from tevatron.core.cli.client import read_stack_file
from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings


def database_url() -> str:
    """Return TEVATRON_DATABASE_URL, or the database of the stack that runs on this home."""
    settings = Settings.from_environment()
    if settings.database_url is not None:
        return settings.database_url.get_secret_value()
    stack = read_stack_file(settings.home)
    if stack is None:
        raise ConfigError(
            f"no database found: TEVATRON_DATABASE_URL is not set and no `tevatron up` runs on {settings.home}"
        )
    return str(stack["database_url"])
