"""A running `tevatron up` with short leases, and what the tests of this folder do to it."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from pydantic import JsonValue
from tests.support.processes import ROOT, Found, wait_for
from tests.support.tiny_model import tiny_folder

from tevatron.core.cli.client import Client, read_stack_file
from tevatron.core.contracts.jobs import FINAL_STATES, EventType, JobSpec, JobState, TrainJob
from tevatron.core.contracts.resources import DatasetKind, DatasetRequest, JobResource, ModelRequest
from tevatron.core.contracts.train import TrainArguments
from tevatron.core.process import guarded, parent_pid, processes_with_marker

SHORT_TIMES = {
    "TEVATRON_LEASE_S": "4",
    "TEVATRON_HEARTBEAT_S": "0.5",
    "TEVATRON_POLL_S": "0.5",
    "TEVATRON_REPUBLISH_S": "2",
    "TEVATRON_KILL_GRACE_S": "2",
    "TEVATRON_STOP_GRACE_S": "15",
    "TEVATRON_DEVICES": "cpu",
    "OMP_NUM_THREADS": "1",
}
READY_S = 120.0
JOB_S = 280.0
PAUSE_S = 0.3
WORDS = ["river", "stone", "lamp", "bread", "cloud", "paper", "tiger", "green", "seven", "north"]


def wait_patiently(
    look: Callable[[], Found | None], *, timeout_s: float = JOB_S, what: str
) -> Found:
    """Wait as `wait_for` does, but ask seldom: each question is a request, and the machine has work to do."""

    def ask() -> Found | None:
        found = look()
        if not found:
            time.sleep(PAUSE_S)
        return found

    return wait_for(ask, timeout_s=timeout_s, what=what)


def train_job(*, num_processes: int = 1, steps: int = 2, save_steps: int = 10) -> TrainJob:
    """Return a job that trains `tiny` on `train`, one event a step."""
    return TrainJob(
        model="tiny",
        dataset="train",
        num_processes=num_processes,
        arguments=TrainArguments(
            rerank_max_len=256,
            train_group_size=4,
            per_device_train_batch_size=1,
            max_steps=steps,
            save_steps=save_steps,
            logging_steps=1,
            learning_rate=1e-4,
        ),
    )


class LiveStack:
    """The stack's processes, its API, and its folders."""

    def __init__(self, home: Path, process: subprocess.Popen[bytes]) -> None:
        self.home = home
        self.data = home / "data"
        self._process = process
        self.client = Client(self._ready_url())

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator[Self]:
        """Run a stack for the length of the block; afterwards none of its processes may be left."""
        home = folder / "home"
        argv = [sys.executable, "-P", "-m", "tevatron.core.cli.main", "up"]
        argv += ["--home", str(home), "--root", str(folder)]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("TEVATRON_")
        }
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "up.log").open("ab") as log:
            process = subprocess.Popen(
                guarded(argv),
                env={**environment, **SHORT_TIMES, "PYTHONPATH": str(ROOT)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            stack = cls(home, process)
            yield stack
            stack.client.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        wait_for(
            lambda: not processes_of(home), timeout_s=10, what=f"the end of {home}'s processes"
        )

    def _ready_url(self) -> str:
        def url() -> str | None:
            assert self._process.poll() is None, "`tevatron up` ended: see up.log"
            stack = read_stack_file(self.home)
            return None if stack is None else str(stack["url"])

        return wait_for(url, timeout_s=READY_S, what="the stack")

    # Its processes

    def pid(self, name: str) -> int:
        """Return the process of a service."""
        stack = read_stack_file(self.home)
        assert stack is not None
        pids = stack["pids"]
        assert isinstance(pids, dict)
        return int(str(pids[name]))

    def kill(self, name: str) -> None:
        """kill -9 a service; the supervisor starts it again."""
        os.kill(self.pid(name), signal.SIGKILL)

    def scorer_children(self) -> list[int]:
        """Return the servers that the scorer host has started."""
        return [
            pid
            for pid in processes_of(self.home.parent)
            if b"tevatron.scorer.server.main" in command_line(pid)
        ]

    # Its jobs

    def submit(self, spec: JobSpec) -> str:
        """Submit one job and return its id."""
        [job] = self.client.submit(spec)
        return job.id

    def job(self, job_id: str) -> JobResource:
        """Return a job as it is now."""
        return self.client.job(job_id)

    def wait_final(self, job_id: str, *, timeout_s: float = JOB_S) -> JobResource:
        """Wait for the job's end."""

        def final() -> JobResource | None:
            job = self.job(job_id)
            return job if job.state in FINAL_STATES else None

        return wait_patiently(final, timeout_s=timeout_s, what=f"the end of {job_id}")

    def wait_succeeded(self, job_id: str, *, timeout_s: float = JOB_S) -> JobResource:
        """Wait for the job's good end."""
        job = self.wait_final(job_id, timeout_s=timeout_s)
        assert job.state is JobState.SUCCEEDED, f"{job.reason} in {job.phase}: {job.message}"
        return job

    def data_of(self, job_id: str, kind: EventType) -> list[dict[str, JsonValue]]:
        """Return the data of the job's events of a type, with their attempts."""
        events = self.client.events(job_id)
        return [{**event.data, "attempt": event.attempt} for event in events if event.type is kind]

    def steps(self, job_id: str, *, attempt: int) -> list[int]:
        """Return the training steps of an attempt, as its metrics show them."""
        return [
            int(str(data["step"]))
            for data in self.data_of(job_id, EventType.METRICS)
            if data["attempt"] == attempt and "step" in data
        ]

    def wait_event(
        self, job_id: str, kind: EventType, matches: Callable[[Mapping[str, JsonValue]], bool]
    ) -> None:
        """Wait until the job has an event of this type that matches; it must not have ended before."""
        seen = 0

        def found() -> bool:
            nonlocal seen
            over = self.job(job_id).state in FINAL_STATES
            for event in self.client.events(job_id, after=seen):
                seen = event.seq
                if event.type is kind and matches(event.data):
                    return True
            assert not over, f"{job_id} ended before: {self.job(job_id)}"
            return False

        wait_patiently(found, timeout_s=JOB_S, what=f"a {kind} event of {job_id}")

    def wait_step(self, job_id: str, step: int) -> None:
        """Wait until the job has trained this step."""
        self.wait_event(
            job_id, EventType.METRICS, lambda data: int(str(data.get("step", 0))) >= step
        )

    def saved_steps(self, job_id: str) -> list[int]:
        """Return the steps of the training states that lie on the disk."""
        folders = (self.data / "runs" / job_id / "states").glob("step-*")
        return sorted(int(path.name[5:]) for path in folders if path.name[5:].isdigit())

    def published_by(self, job_id: str) -> list[str]:
        """Return the paths of the checkpoints that this job has published."""
        return [row.path for row in self.client.checkpoints() if row.job_id == job_id]

    def assert_succeeded_once(self, job_id: str) -> None:
        """Check that the job's history has one good end, after which nothing happened."""
        events = self.client.events(job_id)
        ends = [event for event in events if event.data.get("state") == "succeeded"]
        assert ends == events[-1:]
        assert [event.seq for event in events] == list(range(1, len(events) + 1))
        wait_for(
            lambda: not processes_with_marker(f"{job_id}:"), timeout_s=5, what="no process left"
        )


def torchrun_of(job_id: str) -> int:
    """Return the process of a job's torchrun."""
    marked = processes_with_marker(f"{job_id}:")
    [root] = [pid for pid in marked if parent_pid(pid) not in marked]
    return root


def ranks_of(job_id: str) -> list[int]:
    """Return the processes of a job's ranks, as they were started: the first one reports."""
    root = torchrun_of(job_id)
    return [pid for pid in processes_with_marker(f"{job_id}:") if parent_pid(pid) == root]


def processes_of(folder: Path) -> list[int]:
    """Return the living processes whose command line, working folder or environment names this folder."""
    needle = str(folder).encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            seen = (entry / "environ").read_bytes() + command_line(int(entry.name))
            cwd = os.fsencode((entry / "cwd").readlink())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if needle in seen or cwd.startswith(needle):
            found.append(int(entry.name))
    return sorted(found)


def command_line(pid: int) -> bytes:
    """Return a process's arguments, empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def make_inputs(stack: LiveStack, folder: Path) -> None:
    """Make and register `tiny` (a model), `train` (training data), `small` (a BEIR folder) and `first` (a run)."""
    chosen = random.Random(1)

    def text(length: int) -> str:
        return " ".join(chosen.choices(WORDS, k=length))

    tiny_folder(folder / "tiny")
    rows = [
        {
            "query_id": f"q{number}",
            "query": text(4),
            "positive_passages": [{"docid": f"p{number}", "title": "", "text": text(12)}],
            "negative_passages": [
                {"docid": f"n{number}-{place}", "title": "", "text": text(12)} for place in range(3)
            ],
        }
        for number in range(400)
    ]
    write_lines(folder / "train.jsonl", rows)
    beir = folder / "small"
    (beir / "qrels").mkdir(parents=True)
    write_lines(
        beir / "corpus.jsonl",
        [{"_id": f"d{number}", "title": "", "text": text(20)} for number in range(200)],
    )
    write_lines(
        beir / "queries.jsonl", [{"_id": f"q{number}", "text": text(4)} for number in range(40)]
    )
    judged = [f"q{number}\td{number}\t1\n" for number in range(40)]
    (beir / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(judged))
    ranked = [
        f"q{query}\td{(query + place) % 200}\t{100 - place}\n"
        for query in range(40)
        for place in range(100)
    ]
    (folder / "first.tsv").write_text("".join(ranked))
    client = stack.client
    client.register_model(ModelRequest(name="tiny", path=str(folder / "tiny")))
    for name, kind, path in (
        ("train", DatasetKind.TRAINING, folder / "train.jsonl"),
        ("small", DatasetKind.BEIR, beir),
        ("first", DatasetKind.RANKLIST, folder / "first.tsv"),
    ):
        client.register_dataset(DatasetRequest(name=name, kind=kind, path=str(path)))


def write_lines(path: Path, rows: list[dict[str, object]]) -> None:
    """Write JSON Lines."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
