"""A trainer's worker in the test's process, the jobs that it takes, and what they leave."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pydantic import JsonValue
from sqlalchemy import select
from tests.support.processes import wait_for

from tevatron.core.contracts.jobs import ExportJob, JobKind, TrainJob
from tevatron.core.settings import Settings
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.models import Checkpoint, DatasetKind, Job
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.store.session import Sessions
from tevatron.core.worker.runner import run_next_job
from tevatron.trainer.launchers import Launcher
from tevatron.trainer.launchers.local import LocalLauncher
from tevatron.trainer.tasks import Tasks

SUPPORT = Path(__file__).parent
ROW = {"query": "q", "positive_passages": [{"text": "yes"}], "negative_passages": [{"text": "no"}]}


class Bench:
    """A worker in this process, and the jobs that it takes."""

    def __init__(
        self,
        settings: Settings,
        sessions: Sessions,
        checkpoint: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.settings = settings.model_copy(update={"devices": "cpu"})
        self.sessions = sessions
        self.checkpoint = checkpoint
        self.monkeypatch = monkeypatch
        self.shutdown = False
        self.job_ids: list[str] = []
        self.make_launcher: Callable[[Settings], Launcher] = LocalLauncher
        (settings.data / "models" / "tiny").mkdir(parents=True)
        model = settings.data / "models" / "tiny"
        (model / "config.json").write_text('{"model_type": "llama"}')
        (model / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
        (model / "model.safetensors").write_bytes(b"")
        (settings.data / "train.jsonl").write_text(json.dumps(ROW) + "\n")
        with sessions.begin() as session:
            ModelRepository(session).create("tiny", key_id=None, path="models/tiny")
            DatasetRepository(session).create(
                "train", key_id=None, kind=DatasetKind.TRAINING, stats={}, path="train.jsonl"
            )

    def behave(self, **behaviour: JsonValue) -> None:
        self.monkeypatch.setenv(
            "STAND_IN", json.dumps({"export": str(self.checkpoint), **behaviour})
        )

    def submit(self, spec: TrainJob | ExportJob) -> str:
        with self.sessions.begin() as session:
            [job] = JobRepository(session).submit({"": spec}, key_id=None)
        self.job_ids.append(job.id)
        return job.id

    def train(self, **fields: int) -> str:
        return self.submit(TrainJob(name="first", model="tiny", dataset="train", **fields))

    def work(self) -> bool:
        tasks = Tasks(
            lambda _: self.make_launcher(self.settings),
            train_module="stand_in_program",
            export_module="stand_in_program",
        )
        return run_next_job(
            [JobKind.TRAIN, JobKind.EXPORT],
            handlers={JobKind.TRAIN: tasks.train, JobKind.EXPORT: tasks.export},
            settings=self.settings,
            sessions=self.sessions,
            worker_name="here",
            should_stop=lambda: self.shutdown,
        )

    @contextmanager
    def working(self) -> Iterator[None]:
        """Work beside the test; the block acts, and leaving it waits for the worker."""
        thread = threading.Thread(target=self.work)
        thread.start()
        try:
            yield
        finally:
            thread.join(timeout=60)
            assert not thread.is_alive()

    def job(self, job_id: str) -> Job:
        with self.sessions() as session:
            return session.get_one(Job, job_id)

    def events(self, job_id: str, kind: str) -> list[dict[str, JsonValue]]:
        with self.sessions() as session:
            rows = JobRepository(session).events_page(job_id, limit=10_000)
            return [{**row.data, "attempt": row.attempt} for row in rows if row.type == kind]

    def steps(self, job_id: str, attempt: int) -> list[JsonValue]:
        return [
            data["step"] for data in self.events(job_id, "metrics") if data["attempt"] == attempt
        ]

    def saved(self, job_id: str, attempt: int) -> list[int]:
        messages = [
            str(data["message"])
            for data in self.events(job_id, "log")
            if data["attempt"] == attempt
        ]
        start = "saved the training state of step "
        return [int(text.removeprefix(start)) for text in messages if text.startswith(start)]

    def phases(self, job_id: str) -> list[JsonValue]:
        return [data["phase"] for data in self.events(job_id, "phase")]

    def checkpoints(self) -> list[Checkpoint]:
        with self.sessions() as session:
            return list(session.scalars(select(Checkpoint)))

    def run(self, job_id: str) -> Path:
        return self.settings.data / "runs" / job_id

    def published(self) -> list[str]:
        folder = self.settings.data / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def wait_for_step(self, job_id: str, step: int, attempt: int = 1) -> None:
        wait_for(lambda: step in self.steps(job_id, attempt), what=f"step {step}")

    def cancel(self, job_id: str) -> None:
        with self.sessions.begin() as session:
            JobRepository(session).request_cancel(job_id, key_id=None)
