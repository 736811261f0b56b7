"""Migrations build what the models say, on an empty database and back; another revision is refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, create_engine, inspect, make_url, text

from tevatron.core.errors import ConfigError
from tevatron.core.store.models import Base
from tevatron.core.store.session import alembic_config, check_schema, migrate

CONSTRAINTS = text(
    "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
    "WHERE connamespace = 'public'::regnamespace AND conrelid::regclass::text <> 'alembic_version' "
    "AND contype <> 'n' ORDER BY 1, 2"
)
INDEXES = text(
    "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'public' "
    "AND tablename <> 'alembic_version' ORDER BY 1"
)


def _constraints_and_indexes(engine):
    with engine.connect() as connection:
        return [list(map(tuple, connection.execute(query))) for query in (CONSTRAINTS, INDEXES)]


@pytest.fixture
def empty_url(database_url):
    """The test's database with nothing in it."""
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()
    return database_url


@pytest.fixture
def empty_engine(empty_url):
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


def _alembic(engine: Engine, run) -> None:
    with engine.begin() as connection:
        config = alembic_config()
        config.attributes["connection"] = connection
        run(config)


def test_migrations_build_what_the_models_say(engine):
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_server_default": True})
        assert compare_metadata(context, Base.metadata) == []


def test_migrations_build_the_same_constraints_and_indexes_as_the_models(engine, empty_engine):
    # `engine` and `empty_engine` are one database; alembic does not compare CHECKs, so Postgres does.
    Base.metadata.create_all(empty_engine)
    from_models = _constraints_and_indexes(empty_engine)
    Base.metadata.drop_all(empty_engine)
    _alembic(empty_engine, lambda config: command.upgrade(config, "head"))
    assert _constraints_and_indexes(empty_engine) == from_models
    assert len(from_models[0]) > 30


def test_downgrade_leaves_nothing_and_upgrade_comes_back(engine):
    before = _constraints_and_indexes(engine)
    _alembic(engine, lambda config: command.downgrade(config, "base"))
    assert inspect(engine).get_table_names() == ["alembic_version"]
    _alembic(engine, lambda config: command.upgrade(config, "head"))
    assert _constraints_and_indexes(engine) == before


def test_services_that_start_at_once_migrate_one_after_the_other(empty_url, empty_engine):
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(migrate, [empty_url] * 4))
    check_schema(empty_engine)


def test_a_database_without_schema_is_refused(empty_engine):
    with pytest.raises(
        ConfigError, match="revision none, this build needs 0010: run `tevatron migrate`"
    ):
        check_schema(empty_engine)


def test_another_revision_is_refused(engine):
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError, match="revision 9999, this build needs 0010"):
        check_schema(engine)


def test_migrate_works_from_another_working_folder(empty_url, empty_engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    migrate(empty_url)
    check_schema(empty_engine)


def test_each_test_gets_its_own_database(postgres_url, database_url):
    assert make_url(postgres_url).database == "tevatron"
    assert make_url(database_url).database != "tevatron"
