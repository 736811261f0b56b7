"""What a log line looks like for a program and for a person."""

import io
import json
import logging
import sys

import pytest

from tevatron.core.logging import configure_logging


class Terminal(io.StringIO):
    """A standard error that a person reads."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restored():
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_file_gets_json(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("trainer")
    logging.getLogger("a").warning("step %d", 3)
    entry = json.loads(stream.getvalue())
    assert (entry["level"], entry["service"], entry["message"]) == ("warning", "trainer", "step 3")


def test_a_terminal_gets_plain_lines(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    configure_logging("trainer")
    logging.getLogger("a").warning("step %d", 3)
    assert stream.getvalue().split(" ", 1)[1] == "WARNING step 3\n"
