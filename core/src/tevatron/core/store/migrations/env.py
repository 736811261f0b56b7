"""Alembic's entry: run by `session.migrate` on the connection that it hands over, never by itself."""

from alembic import context

from tevatron.core.store.models import Base

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=Base.metadata)
with context.begin_transaction():
    context.run_migrations()
