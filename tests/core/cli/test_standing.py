"""Commands about scorers and webhooks, against a server that answers what the API does."""

import json

import pytest
from tests.core.cli.test_client import client, server  # noqa: F401  fixtures
from typer.testing import CliRunner

from tevatron.core.cli import scorers
from tevatron.core.cli.main import app
from tevatron.core.errors import ConfigError, UnavailableError

SCORER = {
    "id": "scorer_1",
    "name": "tuned",
    "state": "wanted",
    "replicas": 2,
    "ready_replicas": 0,
    "servers": [],
    "checkpoint_id": "ckpt_1",
    "model_id": None,
    "engine": "hf",
    "dtype": None,
    "url": None,
    "holder": None,
    "external": False,
    "job_id": None,
    "ttl_s": None,
    "error": None,
    "created_at": "2026-01-01T00:00:00Z",
}
READY = {**SCORER, "state": "ready", "ready_replicas": 1, "url": "http://127.0.0.1:9"}
WEBHOOK = {
    "id": "webhook_1",
    "name": None,
    "url": "https://hooks.example/x",
    "disabled_at": None,
    "created_at": "2026-01-01T00:00:00Z",
}


@pytest.fixture
def run(server, monkeypatch):  # noqa: F811
    """Run the command against the server, quickly."""
    monkeypatch.setenv("TEVATRON_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(scorers, "_LOOK_S", 0.0)

    def run(*words):
        return CliRunner().invoke(app, [*words], catch_exceptions=True)

    return run


def test_a_scorer_is_waited_for_and_its_id_written(server, run):  # noqa: F811
    starting = {**SCORER, "state": "starting"}
    server.answers = [(202, {}, SCORER), (200, {}, starting), (200, {}, starting), (200, {}, READY)]
    done = run("scorers", "start", "tuned", "--replicas", "2", "--ttl-s", "60")
    assert done.exit_code == 0, done.output
    assert done.stdout == "scorer_1\n"
    assert done.stderr == "scorer_1 is wanted\nscorer_1 is starting\n"
    method, path, _, body = server.requests[0]
    assert (method, path) == ("POST", "/v1/scorers")
    assert body == {"checkpoint": "tuned", "engine": "hf", "replicas": 2, "ttl_s": 60.0}
    assert [path for _, path, _, _ in server.requests[1:]] == ["/v1/scorers/scorer_1"] * 3


def test_one_that_fails_says_why(server, run):  # noqa: F811
    failed = {**SCORER, "state": "failed", "error": "no such template"}
    server.answers = [(202, {}, SCORER), (200, {}, failed)]
    done = run("scorers", "start", "tuned")
    assert isinstance(done.exception, UnavailableError)
    assert str(done.exception) == "scorer scorer_1 is failed: no such template"


def test_one_that_is_not_waited_for(server, run):  # noqa: F811
    server.answers = [(202, {}, SCORER)]
    done = run("scorers", "start", "--model", "base", "--prompt-template", "plain", "--no-wait")
    assert done.stdout == "scorer_1\n"
    assert len(server.requests) == 1


@pytest.mark.parametrize("words", [[], ["tuned", "--model", "base"], ["--model", "base"]])
def test_a_scorer_of_nothing_or_of_two_things_is_refused(run, words):
    done = run("scorers", "start", *words)
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith("scorer is not right:")


def test_scorers_are_listed_and_let_go(server, run):  # noqa: F811
    server.answers = [(200, {}, {"data": [READY], "has_more": False, "next": None})]
    line = run("scorers", "list").stdout.splitlines()[1].split()
    assert line == ["scorer_1", "tuned", "ready", "1/2", "ckpt_1", "hf", "http://127.0.0.1:9"]
    server.answers = [(202, {}, {**READY, "state": "stopping"})]
    assert run("scorers", "stop", "tuned").stderr == "scorer_1 is stopping\n"
    assert server.requests[-1][:2] == ("DELETE", "/v1/scorers/tuned")


def test_a_webhook_shows_its_secret_once(server, run):  # noqa: F811
    server.answers = [(201, {}, {**WEBHOOK, "secret": "whsec_x"})]
    done = run("webhooks", "add", "https://hooks.example/x", "--name", "chat")
    assert done.stdout == "whsec_x\n"
    assert server.requests[0][3] == {"url": "https://hooks.example/x", "name": "chat"}
    server.answers = [(200, {}, {"data": [WEBHOOK], "has_more": False, "next": None})]
    assert json.loads(run("webhooks", "list", "--json").stdout) == [WEBHOOK]


def test_deliveries_are_listed_and_a_webhook_removed(server, run):  # noqa: F811
    delivery = {
        "id": "msg_1",
        "job_id": "job_1",
        "state": "pending",
        "attempts": 2,
        "next_at": "2026-01-01T00:00:00Z",
        "last_error": "answered 500",
        "payload": {"type": "job.failed"},
        "created_at": "2026-01-01T00:00:00Z",
    }
    server.answers = [(200, {}, {"data": [delivery], "has_more": False, "next": None})]
    shown = run("webhooks", "deliveries", "chat").stdout
    assert shown.splitlines()[1].split() == [
        *("msg_1", "job_1", "job.failed", "pending", "2", "answered", "500")
    ]
    server.answers = [(204, {}, b"")]
    assert run("webhooks", "remove", "chat").exit_code == 0
    assert server.requests[-1][:2] == ("DELETE", "/v1/webhooks/chat")
