"""The probe of a container without a port: it fails when a part that the service needs does not answer."""

from __future__ import annotations

import subprocess
import sys

COMMAND = [sys.executable, "-P", "-m", "tevatron.core.worker.probe"]


def run(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=False)


def test_all_parts_answer(environment):
    answer = run(environment)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_a_broker_that_does_not_answer_is_told(environment):
    answer = run({**environment, "TEVATRON_BROKER_URL": "redis://127.0.0.1:1/0"})
    assert answer.returncode == 1
    assert "127.0.0.1:1" in answer.stderr


def test_a_scorer_host_has_no_broker(environment):
    del environment["TEVATRON_BROKER_URL"]
    assert run(environment).returncode == 0


def test_a_database_that_does_not_answer_is_told(environment):
    url = "postgresql+psycopg://tevatron:secret@127.0.0.1:1/tevatron"
    answer = run({**environment, "TEVATRON_DATABASE_URL": url})
    assert answer.returncode == 1
    assert answer.stderr.startswith("not ready: ")
    assert "secret" not in answer.stderr


def test_a_missing_setting_is_named(environment):
    del environment["TEVATRON_DATABASE_URL"]
    answer = run(environment)
    assert answer.returncode == 1
    assert "TEVATRON_DATABASE_URL is not set" in answer.stderr
