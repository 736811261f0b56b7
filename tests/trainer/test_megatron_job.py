"""A train job of the megatron backend: through the real runner, torchrun and Megatron, which loses a rank on the way."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import select
from tests.support.processes import wait_for
from tests.support.tiny_model import tiny_folder

from tevatron.core.contracts.checkpoint import read_contract
from tevatron.core.contracts.jobs import FailReason, JobKind, JobState, TrainJob
from tevatron.core.process import end_processes, parent_pid, processes_with_marker
from tevatron.core.settings import Settings
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.models import Checkpoint, DatasetKind, Job
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.store.session import Sessions
from tevatron.core.worker.runner import run_next_job
from tevatron.trainer.launchers.local import LocalLauncher
from tevatron.trainer.tasks import Tasks

pytestmark = pytest.mark.db

ROOT = Path(__file__).parents[2]
MEGATRON_PYTHON = ROOT / ".venv-megatron" / "bin" / "python"
ROW = {
    "query_id": "1",
    "query": "what is it",
    "positive_passages": [{"docid": "a", "title": "", "text": "this is it"}],
    "negative_passages": [{"docid": "b", "title": "", "text": "that is not"}],
}


class Worker:
    """A worker in this process, with a registered model and dataset."""

    def __init__(self, settings: Settings, sessions: Sessions) -> None:
        self.settings = settings.model_copy(update={"devices": "cpu", "stop_grace_s": 30.0})
        self.sessions = sessions
        self.job_ids: list[str] = []
        tiny_folder(settings.data / "models" / "tiny")
        rows = [{**ROW, "query_id": str(number)} for number in range(8)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (settings.data / "train.jsonl").write_text(text, encoding="utf-8")
        with sessions.begin() as session:
            ModelRepository(session).create("tiny", key_id=None, path="models/tiny")
            DatasetRepository(session).create(
                "train", key_id=None, kind=DatasetKind.TRAINING, stats={}, path="train.jsonl"
            )

    def submit(self, *, num_processes: int, megatron: dict[str, int]) -> str:
        spec = TrainJob(
            name="first",
            model="tiny",
            dataset="train",
            backend="megatron",
            num_processes=num_processes,
            arguments={
                "train_group_size": 2,
                "per_device_train_batch_size": 2,
                "max_steps": 14,
                "save_steps": 2,
                "logging_steps": 1,
                "learning_rate": 1e-3,
                "megatron": megatron,
            },
        )
        with self.sessions.begin() as session:
            [job] = JobRepository(session).submit({"": spec}, key_id=None)
        self.job_ids.append(job.id)
        return job.id

    def work(self) -> bool:
        tasks = Tasks(lambda _: LocalLauncher(self.settings))
        return run_next_job(
            [JobKind.TRAIN],
            handlers={JobKind.TRAIN: tasks.train},
            settings=self.settings,
            sessions=self.sessions,
            worker_name="here",
            should_stop=lambda: False,
        )

    def job(self, job_id: str) -> Job:
        with self.sessions() as session:
            return session.get_one(Job, job_id)

    def steps(self, job_id: str, attempt: int) -> list[int]:
        with self.sessions() as session:
            rows = JobRepository(session).events_page(job_id, limit=10_000)
            found = [row for row in rows if row.type == "metrics" and row.attempt == attempt]
            return [int(str(row.data["step"])) for row in found]


@pytest.fixture
def worker(settings: Settings, sessions: Sessions) -> Iterator[Worker]:
    found = Worker(settings, sessions)
    yield found
    for job_id in found.job_ids:
        assert processes_with_marker(f"{job_id}:") == []
        end_processes(f"{job_id}:", 0)


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
    if not MEGATRON_PYTHON.is_file():
        pytest.skip("Megatron's environment is not there: make test-megatron")
    wrapper = tmp_path / "python-on-cpu"
    shim = ROOT / "tests" / "megatron" / "site"
    wrapper.write_text(f"#!/bin/sh\nPYTHONPATH='{shim}' exec '{MEGATRON_PYTHON}' \"$@\"\n")
    wrapper.chmod(0o755)
    worker.settings = worker.settings.model_copy(update={"megatron_python": wrapper})
    job_id = worker.submit(num_processes=2, megatron={"tensor_model_parallel_size": 2})
    thread = threading.Thread(target=worker.work)
    thread.start()
    wait_for(lambda: 5 in worker.steps(job_id, 1), timeout_s=400, what="step 5")
    marked = processes_with_marker(f"{job_id}:1")
    [torchrun] = [pid for pid in marked if parent_pid(pid) not in marked]
    os.kill([pid for pid in marked if parent_pid(pid) == torchrun][-1], signal.SIGKILL)
    thread.join(timeout=60)
    assert not thread.is_alive()
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
