"""A train job of the megatron backend: through the real runner, torchrun and Megatron, which loses a rank on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from sqlalchemy import select
from tests.support.megatron_worker import Worker

from tevatron.core.contracts.checkpoint import read_contract
from tevatron.core.contracts.jobs import FailReason, JobState
from tevatron.core.process import parent_pid, processes_with_marker
from tevatron.core.store.models import Checkpoint

pytestmark = pytest.mark.db


def test_without_the_setting_the_job_fails_and_names_it(worker: Worker) -> None:
    job_id = worker.submit(num_processes=1, megatron={})
    assert worker.work()
    job = worker.job(job_id)
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "config_error", "preparing")
    assert "expected TEVATRON_MEGATRON_PYTHON to name the interpreter" in str(job.message)


def test_a_layout_that_cannot_be_is_refused_before_a_rank_starts(worker: Worker) -> None:
    job_id = worker.submit(num_processes=4, megatron={"tensor_model_parallel_size": 4})
    assert worker.work()
    job = worker.job(job_id)
    assert (job.state, job.reason) == (JobState.FAILED, FailReason.CONFIG_ERROR)
    assert job.message == (
        "tensor_model_parallel_size(4) must divide the model's 2 key-value heads"
    )
    assert not (worker.settings.data / "runs" / job_id / "config.json").exists()


@pytest.mark.megatron
@pytest.mark.timeout(900)
def test_a_killed_rank_costs_an_attempt_and_no_saved_step(worker: Worker, tmp_path: Path) -> None:
    worker.use_megatron(tmp_path)
    job_id = worker.submit(num_processes=2, megatron={"tensor_model_parallel_size": 2})
    with worker.working(end_s=60) as thread:
        worker.wait_for_step(job_id, 5, working=thread, timeout_s=400)
        marked = processes_with_marker(f"{job_id}:1")
        [torchrun] = [pid for pid in marked if parent_pid(pid) not in marked]
        os.kill([pid for pid in marked if parent_pid(pid) == torchrun][-1], signal.SIGKILL)
    assert worker.job(job_id).state == JobState.QUEUED
    assert worker.work()
    job = worker.job(job_id)
    assert (job.state, job.attempt, job.message) == (JobState.SUCCEEDED, 2, None)
    again = worker.steps(job_id, 2)
    assert again == list(range(again[0], 15))
    # The state of step 4 was begun, and that of step 2 is whole since then.
    assert again[0] >= 3
    with worker.sessions() as session:
        [checkpoint] = session.scalars(select(Checkpoint))
    assert read_contract(worker.settings.data / checkpoint.path) is not None
