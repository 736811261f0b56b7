"""A worker in the test's process that takes train jobs of both backends, with a tiny model and dataset."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import JsonValue
from tests.support.processes import wait_for
from tests.support.tiny_model import tiny_folder

from tevatron.core.contracts.jobs import JobKind, TrainJob
from tevatron.core.settings import Settings
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.models import DatasetKind, Job
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.store.session import Sessions
from tevatron.core.worker.runner import run_next_job
from tevatron.trainer.launchers import Launcher
from tevatron.trainer.launchers.local import LocalLauncher
from tevatron.trainer.tasks import Tasks

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

    def __init__(
        self, settings: Settings, sessions: Sessions, *, kind: str = "llama", **shape: object
    ) -> None:
        self.settings = settings.model_copy(update={"devices": "cpu", "stop_grace_s": 30.0})
        self.sessions = sessions
        self.job_ids: list[str] = []
        self.make_launcher: Callable[[Settings], Launcher] = LocalLauncher
        tiny_folder(settings.data / "models" / "tiny", kind, **shape)
        rows = [{**ROW, "query_id": str(number)} for number in range(8)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (settings.data / "train.jsonl").write_text(text, encoding="utf-8")
        with sessions.begin() as session:
            ModelRepository(session).create("tiny", key_id=None, path="models/tiny")
            DatasetRepository(session).create(
                "train", key_id=None, kind=DatasetKind.TRAINING, stats={}, path="train.jsonl"
            )

    def submit(
        self,
        *,
        num_processes: int,
        num_nodes: int | None = None,
        backend: str = "megatron",
        validation: str | None = None,
        **arguments: JsonValue,
    ) -> str:
        spec = TrainJob(
            name="first",
            model="tiny",
            dataset="train",
            validation=validation,
            backend=backend,
            num_processes=num_processes,
            num_nodes=num_nodes,
            arguments={
                "train_group_size": 2,
                "per_device_train_batch_size": 2,
                "max_steps": 14,
                "save_steps": 2,
                "logging_steps": 1,
                "learning_rate": 1e-3,
                **arguments,
            },
        )
        with self.sessions.begin() as session:
            [job] = JobRepository(session).submit({"": spec}, key_id=None)
        self.job_ids.append(job.id)
        return job.id

    def work(self) -> bool:
        tasks = Tasks(lambda _: self.make_launcher(self.settings))
        return run_next_job(
            [JobKind.TRAIN],
            handlers={JobKind.TRAIN: tasks.train},
            settings=self.settings,
            sessions=self.sessions,
            worker_name="here",
            should_stop=lambda: False,
        )

    @contextmanager
    def working(self, *, end_s: float) -> Iterator[threading.Thread]:
        """Work beside the test; the block acts, and leaving it waits for the worker."""
        thread = threading.Thread(target=self.work, daemon=True)
        thread.start()
        yield thread
        thread.join(timeout=end_s)
        assert not thread.is_alive()

    def wait_for_step(
        self, job_id: str, step: int, *, working: threading.Thread, timeout_s: float
    ) -> None:
        """Wait until the first attempt has done this step; a failure if it ends before."""

        def reached() -> bool:
            is_over = not working.is_alive()
            found = step in self.steps(job_id, 1)
            assert found or not is_over, f"ended before step {step}: {self.job(job_id).message}"
            return found

        wait_for(reached, timeout_s=timeout_s, what=f"step {step}")

    def job(self, job_id: str) -> Job:
        with self.sessions() as session:
            return session.get_one(Job, job_id)

    def events(self, job_id: str, kind: str) -> list[dict[str, JsonValue]]:
        with self.sessions() as session:
            rows = JobRepository(session).events_page(job_id, limit=10_000)
            return [{**row.data, "attempt": row.attempt} for row in rows if row.type == kind]

    def steps(self, job_id: str, attempt: int) -> list[int]:
        return [
            int(str(data["step"]))
            for data in self.events(job_id, "metrics")
            if data["attempt"] == attempt and "loss" in data
        ]

    def use_megatron(self, folder: Path) -> None:
        """Let the worker start Megatron's interpreter on the CPU; skip the test where it is not there."""
        update = {"megatron_python": megatron_python(folder)}
        self.settings = self.settings.model_copy(update=update)


def megatron_python(folder: Path) -> Path:
    """Make an interpreter that runs Megatron on the CPU, or skip the test by name."""
    if not MEGATRON_PYTHON.is_file():
        pytest.skip("Megatron's environment is not there: make test-megatron")
    wrapper = folder / "python-on-cpu"
    shim = ROOT / "tests" / "megatron" / "site"
    path = f"{shim}:{ROOT}/core/src:{ROOT}/services/trainer/src"
    wrapper.write_text(f"#!/bin/sh\nPYTHONPATH='{path}' exec '{MEGATRON_PYTHON}' \"$@\"\n")
    wrapper.chmod(0o755)
    return wrapper
