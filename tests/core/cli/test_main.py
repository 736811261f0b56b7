"""The command as a process: what it imports, how it fails."""

import os
import subprocess
import sys

import pytest


def tevatron(*words: str, home: str = "/nonexistent") -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TEVATRON_")}
    return subprocess.run(
        [sys.executable, "-P", "-m", "tevatron.core.cli.main", *words],
        env={**environment, "TEVATRON_HOME": home, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_help_imports_nothing_heavy():
    code = (
        "import sys, tevatron.core.cli.main\n"
        "print([name for name in ('pydantic', 'httpx', 'sqlalchemy', 'yaml', 'torch', 'psycopg')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "words",
    [
        ["jobs"],
        ["show", "job_1"],
        ["logs", "job_1"],
        ["cancel", "job_1"],
        ["resume", "job_1"],
        ["save", "job_1"],
        ["stop", "job_1"],
        ["results"],
        ["results", "a", "b"],
        ["models", "list"],
        ["datasets", "list"],
        ["checkpoints", "list"],
        ["scorers", "start", "c"],
        ["scorers", "list"],
        ["scorers", "stop", "s"],
        ["webhooks", "add", "https://h.example"],
        ["webhooks", "list"],
        ["webhooks", "deliveries", "w"],
        ["webhooks", "remove", "w"],
        ["submit", "eval", "--dataset", "d", "--benchmark", "beir15/scifact"],
        ["submit", "annotate", "--dataset", "d", "--checkpoint", "c", "--max-negatives", "3"],
        ["submit", "eval", "--dataset", "d", "--checkpoint", "c", "--replicas", "2"],
        ["submit", "eval", "--dataset", "d", "--scorer", "s"],
        ["submit", "annotate", "--dataset", "d", "--checkpoint", "c", "--replicas", "2"],
    ],
)
def test_command_without_a_stack_is_one_line_and_status_1(words):
    done = tevatron(*words)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("tevatron: no API found: TEVATRON_URL is not set")
    assert len(done.stderr.splitlines()) == 1


def test_results_take_two_evaluations_or_none():
    done = tevatron("results", "a", "b", "c")
    assert done.returncode != 0
    assert "expected two evaluations and no --job or --dataset, got 3: a b c" in done.stderr


def test_keys_without_a_database_say_so():
    done = tevatron("keys", "list")
    assert done.returncode == 1
    assert "no database found: TEVATRON_DATABASE_URL is not set" in done.stderr


def test_malformed_setting_is_named(tmp_path):
    environment = {**os.environ, "TEVATRON_LEASE_S": "soon"}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tevatron.core.cli.main", "jobs"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "environment variable TEVATRON_LEASE_S" in done.stderr


def test_training_flags_are_listed():
    done = tevatron("submit", "train", "--flags")
    assert done.returncode == 0
    assert "--learning_rate " in done.stdout


def test_up_refuses_a_root_that_is_not_there(tmp_path):
    done = tevatron("up", "--root", str(tmp_path / "none"), home=str(tmp_path / "home"))
    assert done.returncode == 1
    assert "expected a folder, there is none at" in done.stderr
