"""Waiting for a server that was just started."""

import subprocess
import sys

import pytest

from tevatron.core.cli.stack.readiness import wait_until_ready
from tevatron.core.errors import UnavailableError


@pytest.fixture
def process():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def wait(process, check, *, timeout_s=30.0):
    wait_until_ready(
        "Server", process, check=check, not_yet=OSError, where="log: x", timeout_s=timeout_s
    )


def test_it_is_asked_until_it_answers(process):
    answers = [OSError("refused"), OSError("refused"), None]

    def check():
        if error := answers.pop(0):
            raise error

    wait(process, check)
    assert answers == []


def test_one_that_never_answers_is_named_with_its_last_word(process):
    def check():
        raise OSError("refused")

    with pytest.raises(UnavailableError, match=r"Server does not answer after 0\.05 s: refused"):
        wait(process, check, timeout_s=0.05)


def test_one_that_ended_is_not_waited_for(process):
    process.kill()
    process.wait()
    with pytest.raises(UnavailableError, match=r"Server ended with status -9 .* \(log: x\)"):
        wait(process, lambda: None)
    with pytest.raises(UnavailableError, match="Server ended with status None"):
        wait(None, lambda: None)


def test_an_error_of_another_kind_is_not_swallowed(process):
    def check():
        raise ValueError("ours")

    with pytest.raises(ValueError, match="ours"):
        wait(process, check)
