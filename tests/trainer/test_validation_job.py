"""Real jobs of both backends: held-out rows scored into the job's history; saved and stopped while they train."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select
from tests.support.megatron_worker import Worker
from tests.support.processes import wait_for

from tevatron.core.contracts.checkpoint import read_contract
from tevatron.core.contracts.jobs import JobState
from tevatron.core.errors import ConflictError
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.models import Checkpoint

pytestmark = pytest.mark.db


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "num_processes"),
    [("hf", 1), pytest.param("megatron", 2, marks=[pytest.mark.megatron, pytest.mark.full])],
)
def test_a_training_is_validated_saved_and_stopped(
    worker: Worker, tmp_path: Path, backend: str, num_processes: int
) -> None:
    if backend == "megatron":
        worker.use_megatron(tmp_path)
    job_id = worker.submit(
        backend=backend,
        num_processes=num_processes,
        validation="train",
        max_steps=5000,
        save_steps=5000,
        eval_steps=2,
    )
    with pytest.raises(ConflictError, match=r"train job .* is queued; only a job that is training"):
        ask(worker, "request_save", job_id)
    with worker.working(end_s=200) as thread:
        worker.wait_for_step(job_id, 3, working=thread, timeout_s=400)
        ask(worker, "request_save", job_id)
        wait_for(lambda: saved(worker, job_id), timeout_s=100, what="a state")
        ask(worker, "request_stop", job_id)
    job = worker.job(job_id)
    assert (job.state, job.attempt, job.message) == (JobState.SUCCEEDED, 1, None)
    last = worker.steps(job_id, 1)[-1]
    assert last < 5000
    asked_for, end = saved(worker, job_id)
    assert 3 <= asked_for < end == last
    assert job.result is not None
    assert job.result["saved_steps"] == [asked_for, last]
    found = [data for data in worker.events(job_id, "metrics") if "eval_loss" in data]
    steps = [data["step"] for data in found]
    assert steps == sorted({*range(2, last, 2), last})
    assert all(0 <= float(str(data["eval_ndcg@10"])) <= 1 for data in found)
    with worker.sessions() as session:
        [checkpoint] = session.scalars(select(Checkpoint))
    contract = read_contract(worker.settings.data / checkpoint.path)
    assert contract is not None
    assert contract.arguments.eval_steps == 2


def ask(worker: Worker, request: str, job_id: str) -> None:
    with worker.sessions.begin() as session:
        getattr(JobRepository(session), request)(job_id, key_id=None)


def saved(worker: Worker, job_id: str) -> list[int]:
    start = "saved the training state of step "
    told = [str(data["message"]) for data in worker.events(job_id, "log")]
    return [int(text.removeprefix(start)) for text in told if text.startswith(start)]
