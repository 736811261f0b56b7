"""Cancel of a real train job: `cancelled` within 15 s, no process left, nothing half-done published."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from tests.integration.live_stack import LiveStack, ranks_of, train_job
from tests.support.processes import wait_for

from tevatron.core.contracts.jobs import JobState
from tevatron.core.process import processes_with_marker

pytestmark = [pytest.mark.e2e, pytest.mark.db]

LIMIT_S = 15.0


def cancel_and_check(stack: LiveStack, job_id: str) -> None:
    began = time.monotonic()
    stack.client.cancel(job_id)
    job = stack.wait_final(job_id)
    took = time.monotonic() - began
    assert (job.state, job.reason) == (JobState.CANCELLED, None)
    assert took < LIMIT_S
    assert processes_with_marker(f"{job_id}:") == []
    assert stack.published_by(job_id) == []
    run = stack.data / "runs" / job_id
    assert not list(run.glob("export*"))
    assert all(path.name[5:].isdigit() for path in run.glob("states/*"))
    suffix = job_id.removeprefix("job_")
    assert not (stack.data / "checkpoints" / f"ckpt_{suffix}").exists()


def test_while_it_starts(stack: LiveStack) -> None:
    job_id = stack.submit(train_job(num_processes=2, steps=1000))
    wait_for(
        lambda: processes_with_marker(f"{job_id}:"), timeout_s=120, what="the attempt's processes"
    )
    assert stack.job(job_id).state is JobState.STARTING
    cancel_and_check(stack, job_id)


def test_while_it_trains(stack: LiveStack) -> None:
    job_id = stack.submit(train_job(num_processes=2, steps=1000, save_steps=1000))
    stack.wait_step(job_id, 3)
    assert stack.job(job_id).state is JobState.RUNNING
    cancel_and_check(stack, job_id)


def test_while_it_saves_a_state(stack: LiveStack) -> None:
    job_id = stack.submit(train_job(steps=1000, save_steps=1))
    stack.wait_step(job_id, 2)
    stop_in_a_save(stack.data / "runs" / job_id / "states", ranks_of(job_id)[0])
    cancel_and_check(stack, job_id)


def stop_in_a_save(states: Path, rank: int) -> None:
    """Halt the rank at a moment when a half-written state lies on the disk; it hears no SIGTERM then."""

    def halted() -> bool:
        if not list(states.glob("*.tmp")):
            return False
        os.kill(rank, signal.SIGSTOP)
        time.sleep(0.05)
        if list(states.glob("*.tmp")):
            return True
        os.kill(rank, signal.SIGCONT)
        return False

    deadline = time.monotonic() + 60
    while not halted():
        assert time.monotonic() < deadline, "no save was met"
