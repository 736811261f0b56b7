"""The embedded Valkey, for real."""

import signal
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import psutil
import pytest
import redis

from tevatron.core.cli.stack.valkey import EmbeddedValkey
from tevatron.core.errors import UnavailableError


@pytest.fixture
def server(tmp_path):
    server = EmbeddedValkey(tmp_path / "valkey")
    yield server
    server.stop()


def test_takes_commands_with_the_password_only(server):
    url = urlsplit(server.start())
    with redis.Redis.from_url(server.url) as client:
        assert client.ping()
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    with (
        # By itself the client would try again for 4 s.
        redis.Redis(host=url.hostname, port=url.port, retry=None) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()


def test_listens_on_loopback_only(server):
    server.start()
    assert server.process is not None
    connections = psutil.Process(server.process.pid).net_connections(kind="inet")
    assert {found.laddr.ip for found in connections if found.status == psutil.CONN_LISTEN} == {
        "127.0.0.1"
    }


def test_password_is_not_in_the_command_line(server):
    password = urlsplit(server.start()).password
    assert server.process is not None
    assert password
    assert password not in " ".join(psutil.Process(server.process.pid).cmdline())


def test_killed_server_comes_back_empty_under_the_same_url(server):
    url = server.start()
    with redis.Redis.from_url(url) as client:
        client.set("x", "1")
    assert server.process is not None
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()
    assert server.start() == url
    with redis.Redis.from_url(url) as client:
        assert client.get("x") is None


def test_fixed_port_that_is_taken_is_an_error(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = EmbeddedValkey(tmp_path / "valkey", port=port)
        with pytest.raises(UnavailableError, match=f"at its start \\(port {port}\\)"):
            server.start()


def test_free_port_that_is_lost_to_another_is_replaced(tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        ports = iter([taken.getsockname()[1], free])
        monkeypatch.setattr("tevatron.core.cli.stack.valkey.free_port", lambda: next(ports))
        server = EmbeddedValkey(tmp_path / "valkey")
        try:
            assert urlsplit(server.start()).port == free
        finally:
            server.stop()


def test_killed_parent_leaves_no_server(tmp_path):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tevatron.core.cli.stack.valkey import EmbeddedValkey\n"
        "server = EmbeddedValkey(Path(sys.argv[1])); server.start()\n"
        "print(server.process.pid, flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    try:
        child.wait(timeout=10)
    except psutil.TimeoutExpired:
        assert child.status() == psutil.STATUS_ZOMBIE
