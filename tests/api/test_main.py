"""The two processes as an operator starts them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import redis
from httpx_sse import connect_sse
from pydantic import SecretStr
from tests.support.processes import python, running, settings_environment, wait_for
from tests.support.resources import make_resources
from tests.support.store import submit, train_job

from tevatron.core.cli.stack.valkey import EmbeddedValkey
from tevatron.core.settings import Settings
from tevatron.core.store.nudges import nudge


def environment_of(settings: Settings) -> dict[str, str]:
    return {**os.environ, **settings_environment(settings)}


@contextmanager
def api_process(settings: Settings, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = python("-m", "tevatron.api.main", "serve", "--port", str(port))
    url = f"http://127.0.0.1:{port}"
    with running(argv, environment=environment_of(settings), log=log) as process:
        wait_for(lambda: _answers(url), timeout_s=60, what="the API")
        yield process, url


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5, verify=False).status_code == 200
    except httpx.TransportError:
        return False


def test_the_server_ends_well_on_sigterm_with_a_stream_open(settings, sessions, tmp_path: Path):
    with sessions.begin() as session:
        ids = make_resources(session, key_id=None)
    with (
        api_process(settings, tmp_path / "log") as (process, url),
        httpx.Client(base_url=url) as client,
    ):
        with connect_sse(client, "GET", f"/v1/jobs/{ids['job']}/events") as source:
            events = source.iter_sse()
            assert next(events).id == "1"
            process.send_signal(signal.SIGTERM)
            assert list(events) == []
        assert process.wait(20) == 0
    assert '"service": "api"' in (tmp_path / "log").read_text()


@pytest.mark.parametrize("command", ["serve", "dispatcher"])
def test_a_missing_setting_is_a_sentence(command: str):
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("TEVATRON_")
    }
    done = subprocess.run(
        python("-m", "tevatron.api.main", command),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "TEVATRON_DATABASE_URL is not set" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_dispatcher_is_woken_by_a_submission_and_outlives_its_broker(
    settings, sessions, tmp_path: Path
):
    with tempfile.TemporaryDirectory(prefix="tevatron-test-") as folder:
        broker = EmbeddedValkey(Path(folder))
        url = broker.start()
        slow = settings.model_copy(
            update={"broker_url": SecretStr(url), "poll_s": 2.0, "republish_s": 600.0}
        )
        argv = python("-m", "tevatron.api.main", "dispatcher")
        log = tmp_path / "log"
        try:
            with running(argv, environment=environment_of(slow), log=log) as process:
                submit_and_nudge(sessions)
                wait_for(lambda: length(url) == 1, timeout_s=60, what="the first wake-up")
                broker.stop()
                submit_and_nudge(sessions)
                wait_for(lambda: "it tries again" in log.read_text(), what="the failure in the log")
                assert process.poll() is None
                broker.start()
                # Its data is gone: the second job's wake-up comes now, the first one's by age.
                wait_for(lambda: length(url) == 1, timeout_s=60, what="the second wake-up")
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == 0
        finally:
            broker.stop()


def submit_and_nudge(sessions) -> None:
    submit(sessions, a=train_job())
    with sessions.begin() as session:
        nudge(session)


def length(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return int(client.llen("train"))
