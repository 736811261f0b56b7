"""Fixtures on the real parts: one Postgres and one Valkey for the whole run, an empty database for each test.

Use from any test folder:
- `sessions`, `engine`: a database of this test's own, built by the migrations (emptied, see `tests/support/databases.py`);
  `database_url` is its URL, for child processes.
- `broker_url`: the Valkey of the run, emptied for this test.
- `settings`: both, data below `tmp_path`, and short times; `settings.model_copy(update={...})` for others.
- `environment`: the same as `TEVATRON_*` variables for a child process; see `tests.support.processes`.
Helpers are imported as `tests.support.<module>`. With pytest-xdist all of this is there once for each of its workers.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from pydantic import SecretStr
from sqlalchemy import Engine, make_url
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

gc.disable()  # until all is imported: most of what an import makes stays

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # so that `tests.support` is found under --import-mode=importlib

from tests.support.databases import Databases  # noqa: E402
from tests.support.processes import settings_environment  # noqa: E402

from tevatron.core.cli.stack.postgres import EmbeddedPostgres  # noqa: E402
from tevatron.core.cli.stack.valkey import EmbeddedValkey  # noqa: E402
from tevatron.core.settings import Settings  # noqa: E402
from tevatron.core.store.session import Sessions, make_engine, make_sessions, migrate  # noqa: E402

TEMPLATE = "tevatron"

TOGETHER = (
    ("tests/integration/",),
    ("tests/gpu/",),
    ("tests/trainer/launchers/test_slurm.py", "tests/trainer/test_two_nodes.py"),
)
"""Run by one worker, unit by unit: they share a stack, fill the GPU, or start a real Slurm of this machine."""

DEAR = ("tests/integration/", "tests/trainer/", "tests/e2e/")
"""Run first: a dear file that began last would keep one worker busy while the others have nothing left."""


class _Files(LoadFileScheduling):
    """Gives a worker a whole file, for the fixtures that its tests share, or files that belong together."""

    def _split_scope(self, nodeid: str) -> str:
        units = [unit for unit in TOGETHER if nodeid.startswith(unit)]
        return units[0][0] if units else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    return _Files(config, log)


def pytest_collection_finish() -> None:
    leave_to_itself()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after the fixtures that end with the file
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        leave_to_itself()


def leave_to_itself() -> None:
    """Collect, then leave what stays alone: a training or server in this process collects often, and would look at it all."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(DEAR))


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Take away what a command that ran in this process has set up: its handlers write to streams that are closed now."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Run a Postgres server for the session; its `tevatron` database is migrated and stays empty."""
    with tempfile.TemporaryDirectory(prefix="tevatron-test-pg-") as folder:
        server = EmbeddedPostgres(Path(folder), fsync=False)
        url = server.start()
        try:
            migrate(url)
            yield url
        finally:
            server.stop()


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """Run a Valkey server for the session; tests take `broker_url`."""
    with tempfile.TemporaryDirectory(prefix="tevatron-test-valkey-") as folder:
        server = EmbeddedValkey(Path(folder))
        try:
            yield server.start()
        finally:
            server.stop()


@pytest.fixture(scope="session")
def databases(postgres_url: str) -> Iterator[Databases]:
    found = Databases(make_url(postgres_url), TEMPLATE)
    yield found
    found.close()


@pytest.fixture
def database_url(postgres_url: str, databases: Databases) -> Iterator[str]:
    """Take a database of the test's own, and end the clients that it still has afterwards."""
    name = databases.take()
    yield make_url(postgres_url).set(database=name).render_as_string(hide_password=False)
    databases.give_back(name)


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    engine = make_engine(database_url, pool_size=10)
    yield engine
    engine.dispose()


@pytest.fixture
def sessions(engine: Engine) -> Sessions:
    return make_sessions(engine)


@pytest.fixture
def broker_url(valkey_url: str) -> str:
    with redis.Redis.from_url(valkey_url) as client:
        client.flushall()
    return valkey_url


@pytest.fixture
def settings(database_url: str, broker_url: str, tmp_path: Path) -> Settings:
    """Both parts, and times that are short but not so short that a busy machine breaks them."""
    return Settings(
        home=tmp_path / "home",
        data=tmp_path / "data",
        database_url=SecretStr(database_url),
        broker_url=SecretStr(broker_url),
        lease_s=6.0,
        heartbeat_s=0.5,
        poll_s=0.1,
        kill_grace_s=0.5,
        stop_grace_s=5.0,
        republish_s=1.0,
        max_attempts=3,
    )


@pytest.fixture
def environment(settings: Settings) -> dict[str, str]:
    return {**os.environ, **settings_environment(settings)}
