"""`tevatron keys` on a database, as an operator runs it, in this process: a process of its own takes two CPU seconds."""

from __future__ import annotations

import json
import sys

import pytest
from tests.support.commands import call

from tevatron.core.cli.main import main


@pytest.fixture
def keys(environment, monkeypatch):
    def command(words):
        monkeypatch.setattr(sys, "argv", ["tevatron", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0

    def run(*words, check=0):
        return call(command, ["keys", *words], environment=environment, check=check)

    return run


def test_limits_are_set_changed_and_listed(keys):
    made = json.loads(
        keys("create", "ana", "--max-queued", "50", "--max-running", "4", "--json").stdout
    )
    [listed] = json.loads(keys("list", "--json").stdout)
    assert (listed["max_queued"], listed["max_running"]) == ("50", "4")
    done = keys("limit", made["id"], "--max-running", "2")
    assert done.stderr == f"{made['id']}: max_queued none, max_running 2\n"
    [listed] = json.loads(keys("list", "--json").stdout)
    assert (listed["max_queued"], listed["max_running"]) == ("-", "2")


def test_a_limit_of_an_unknown_key_is_one_line(keys):
    done = keys("limit", "key_0", "--max-queued", "1", check=1)
    assert done.stderr == "tevatron: no API key 'key_0'\n"
