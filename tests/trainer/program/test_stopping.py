"""SIGTERM at every moment: before a step's agreement, in the middle of it, after the last one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tevatron.trainer.program.stopping import Request, Stopper


def told(number: int) -> int:
    """Answer for one rank that is told while it waits for the others."""
    os.kill(os.getpid(), signal.SIGTERM)
    return number


def alone(number: int) -> int:
    return number


@pytest.fixture
def stopper(tmp_path: Path) -> Iterator[Stopper]:
    before = signal.getsignal(signal.SIGTERM)
    made = Stopper(tmp_path, rank=0)
    made.install(lambda: None)
    yield made
    signal.signal(signal.SIGTERM, before)


def test_a_signal_before_the_agreement_stops_this_step(stopper: Stopper):
    with stopper.training():
        assert not stopper.agree(alone)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopper.agree(alone)
    assert stopper.stops


def test_another_ranks_signal_stops_this_one(stopper: Stopper):
    with stopper.training():
        assert stopper.agree(lambda _number: Request.STOP)
    assert stopper.stops


def test_a_signal_during_the_agreement_stops_the_next_step(stopper: Stopper):
    with stopper.training():
        assert not stopper.agree(told)
        assert stopper.agree(alone)


def test_a_signal_after_the_last_agreement_ends_before_the_export(tmp_path: Path):
    code = f"""
import os, signal
from pathlib import Path
from tevatron.trainer.program.stopping import Stopper
stopper = Stopper(Path({str(tmp_path)!r}), rank=0)
stopper.install(lambda: print("stopped"))
with stopper.training():
    assert not stopper.agree(lambda number: number)
    os.kill(os.getpid(), signal.SIGTERM)
    print("saved", flush=True)
print("exported")
"""
    run = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()) == (0, ["saved", "stopped"]), run.stderr
