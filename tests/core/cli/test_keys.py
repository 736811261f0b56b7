"""`tevatron keys` on a database, as an operator runs it."""

from __future__ import annotations

import json
import subprocess

import pytest
from tests.support.processes import python


@pytest.fixture
def keys(environment):
    def run(*words):
        return subprocess.run(
            python("-m", "tevatron.core.cli.main", "keys", *words),
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

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
    done = keys("limit", "key_0", "--max-queued", "1")
    assert (done.returncode, done.stderr) == (1, "tevatron: no API key 'key_0'\n")
