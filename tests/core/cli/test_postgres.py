"""The embedded Postgres, for real: where it runs, as whom, and what a kill leaves."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import psycopg
import pytest

from tevatron.core.cli.stack.postgres import EmbeddedPostgres
from tevatron.core.errors import ConfigError

pytestmark = pytest.mark.db

START_AND_WAIT = """
import sys, time
from pathlib import Path
from tevatron.core.cli.stack.postgres import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]), fsync=False)
server.start()
print(server.url.replace("+psycopg", ""), server.process.pid, flush=True)
time.sleep(600)
"""


def connect(server: EmbeddedPostgres) -> psycopg.Connection:
    return psycopg.connect(server.url.replace("+psycopg", ""), autocommit=True)


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def server(tmp_path):
    server = EmbeddedPostgres(tmp_path / "postgres", fsync=False)
    yield server
    server.stop()


def test_database_speaks_utf8_and_sorts_by_code_point(server):
    server.start()
    with connect(server) as connection:
        assert connection.execute("SHOW server_encoding").fetchone() == ("UTF8",)
        rows = connection.execute(
            "SELECT upper(x) FROM (VALUES ('b'), ('é'), ('a')) AS v(x) ORDER BY x"
        )
        assert rows.fetchall() == [("A",), ("B",), ("É",)]


def test_data_survives_stop_and_start(server):
    server.start()
    with connect(server) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS x")
    server.stop()
    server.start()
    with connect(server) as connection:
        assert connection.execute("SELECT x FROM kept").fetchone() == (7,)


def test_runs_in_a_long_path_with_blanks_and_quotes(tmp_path):
    folder = tmp_path / "it's a path" / ("x" * (200 - len(str(tmp_path)))) / "postgres"
    server = EmbeddedPostgres(folder, fsync=False)
    try:
        server.start()
        with connect(server) as connection:
            found = connection.execute("SHOW data_directory").fetchone()
    finally:
        server.stop()
    assert found == (str(folder / "data"),)
    assert len(str(folder)) > 200


def test_killed_parent_leaves_no_server_and_the_next_start_has_its_data(tmp_path):
    folder = tmp_path / "postgres"
    parent = subprocess.Popen(
        [sys.executable, "-c", START_AND_WAIT, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    url, pid = parent.stdout.readline().split()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS x")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone(int(pid))
    server = EmbeddedPostgres(folder, fsync=False)
    try:
        server.start()
        with connect(server) as connection:
            assert connection.execute("SELECT x FROM kept").fetchone() == (7,)
    finally:
        server.stop()


def test_pid_file_that_names_a_living_stranger_does_not_stop_the_start(server):
    server.start()
    server.stop()
    (server._data / "postmaster.pid").write_text(f"{os.getpid()}\n")
    server.start()
    with connect(server) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_interrupted_initdb_is_done_again(server, tmp_path):
    half = tmp_path / "postgres" / "data.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    server.start()
    assert not half.exists()


def test_data_of_another_version_is_refused(server):
    server.start()
    server.stop()
    (server._data / "PG_VERSION").write_text("12\n")
    with pytest.raises(ConfigError, match="was made by Postgres 12, the installed one is 18"):
        server.start()


def test_password_is_needed_and_private(server):
    url = server.start().replace("+psycopg", "")
    password = (server._folder / "password").read_text()
    assert stat.S_IMODE((server._folder / "password").stat().st_mode) == 0o600
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(url.replace(password, "wrong"))


def test_no_tcp_port_is_opened(server):
    server.start()
    assert server.process is not None
    connections = psutil.Process(server.process.pid).net_connections(kind="inet")
    assert [found for found in connections if found.status == psutil.CONN_LISTEN] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root must become another user")
def test_root_runs_it_as_nobody_below_a_folder_that_others_may_not_enter(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    server = EmbeddedPostgres(closed / "postgres", fsync=False)
    try:
        server.start()
        assert server.process is not None
        found = psutil.Process(server.process.pid)
        assert found.username() == "nobody"
        lines = Path(f"/proc/{found.pid}/status").read_text().splitlines()
        capabilities = next(line.split()[1] for line in lines if line.startswith("CapEff"))
        assert int(capabilities, 16) == 1 << 1
    finally:
        server.stop()
    assert stat.S_IMODE(closed.stat().st_mode) == 0o700
    assert closed.stat().st_uid == 0


def test_server_that_cannot_start_is_an_error_with_its_status(server, monkeypatch):
    monkeypatch.setattr("tevatron.core.cli.stack.postgres._START_ATTEMPTS", 1)
    monkeypatch.setattr("tevatron.core.cli.stack.postgres._CONFIG", "shared_buffers = 'nonsense'\n")
    with pytest.raises(Exception, match="Postgres ended with status 1 at its start"):
        server.start()
