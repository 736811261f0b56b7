"""kill -9 of every part, each in the middle of a train job: it succeeds by itself, once, and loses no saved step."""

from __future__ import annotations

import os
import signal

import pytest
from tests.integration.live_stack import LiveStack, ranks_of, torchrun_of, train_job
from tests.support.processes import wait_for

from tevatron.core.process import processes_with_marker

pytestmark = [pytest.mark.e2e, pytest.mark.db]

STEPS = 120
SAVE_STEPS = 10
MIDDLE = 25


def kill(stack: LiveStack, part: str, job_id: str) -> None:
    if part == "torchrun":
        os.kill(torchrun_of(job_id), signal.SIGKILL)
    elif part == "rank":
        os.kill(ranks_of(job_id)[-1], signal.SIGKILL)
    else:
        stack.kill(part)


def assert_whole(stack: LiveStack, job_id: str, *, saved_before: int) -> None:
    """Every step was trained, an attempt goes on where the last saved state ends, and one checkpoint is there."""
    job = stack.job(job_id)
    steps = [stack.steps(job_id, attempt=attempt) for attempt in range(1, job.attempt + 1)]
    every = [step for attempt in steps for step in attempt]
    assert sorted(set(every)) == list(range(1, STEPS + 1))
    # The event of the saved step itself may be one that the killed watcher left: nothing is trained twice up to there.
    assert sorted(step for step in every if step <= saved_before) == list(
        range(1, saved_before + 1)
    )
    for attempt in steps[1:]:
        # First what a killed watcher left unstored, then what is trained: on from a saved state.
        begins = [i for i in range(1, len(attempt)) if attempt[i] != attempt[i - 1] + 1]
        trained = attempt[begins[-1] if begins else 0 :]
        assert trained == list(range(trained[0], STEPS + 1))
        assert len(begins) <= 1
        if begins:
            assert (trained[0] - 1) % SAVE_STEPS == 0
    [path] = stack.published_by(job_id)
    assert (stack.data / path / "reranker.json").is_file()
    stack.assert_succeeded_once(job_id)


@pytest.mark.parametrize(
    "part",
    [
        "trainer",
        pytest.param("torchrun", marks=pytest.mark.full),
        pytest.param("rank", marks=pytest.mark.full),
    ],
)
def test_killed_with_the_ranks_it_goes_on_from_the_saved_state(stack: LiveStack, part: str) -> None:
    job_id = stack.submit(train_job(num_processes=2, steps=STEPS, save_steps=SAVE_STEPS))
    stack.wait_step(job_id, MIDDLE)
    marked = processes_with_marker(f"{job_id}:1")
    saved_before = stack.saved_steps(job_id)[-1]
    kill(stack, part, job_id)
    wait_for(
        lambda: not set(marked) & set(processes_with_marker(f"{job_id}:1")),
        timeout_s=60,
        what="the end of the first attempt's processes",
    )
    assert stack.wait_succeeded(job_id).attempt == 2
    assert_whole(stack, job_id, saved_before=saved_before)


def test_what_is_killed_beside_the_ranks_leaves_them_untouched(stack: LiveStack) -> None:
    """The API, the dispatcher and Valkey, all at once."""
    job_id = stack.submit(train_job(steps=STEPS, save_steps=SAVE_STEPS))
    stack.wait_step(job_id, MIDDLE)
    before = {part: stack.pid(part) for part in ("api", "dispatcher", "valkey")}
    for part in before:
        kill(stack, part, job_id)
    assert stack.wait_succeeded(job_id).attempt == 1
    assert stack.steps(job_id, attempt=1) == list(range(1, STEPS + 1))
    assert_whole(stack, job_id, saved_before=0)
    for part, pid in before.items():
        assert stack.pid(part) != pid


@pytest.mark.full
def test_a_job_that_is_queued_when_valkey_loses_its_data_runs_all_the_same(
    stack: LiveStack,
) -> None:
    running = stack.submit(train_job(steps=STEPS))
    queued = stack.submit(train_job(steps=2))
    stack.wait_step(running, 5)
    stack.kill("valkey")
    for job_id in (running, queued):
        assert stack.wait_succeeded(job_id).attempt == 1
        assert len(stack.published_by(job_id)) == 1
        stack.assert_succeeded_once(job_id)
