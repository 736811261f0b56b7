"""`tevatron up` and the command as real processes, on a home of the test's or the file's own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.support.processes import wait_for
from tests.support.tiny_model import tiny_folder

from tevatron.core.cli.client import Client, read_stack_file

COMMAND = [sys.executable, "-P", "-m", "tevatron.core.cli.main"]
SHORT_TIMES = {
    "TEVATRON_LEASE_S": "12",
    "TEVATRON_HEARTBEAT_S": "1",
    "TEVATRON_POLL_S": "0.2",
    "TEVATRON_REPUBLISH_S": "2",
    "TEVATRON_KILL_GRACE_S": "1",
    "TEVATRON_STOP_GRACE_S": "20",
    "OMP_NUM_THREADS": "1",
}


class Stack:
    """One home, and the `tevatron up` that runs on it now and then."""

    def __init__(self, home: Path, roots: list[Path]) -> None:
        self.home = home
        self.roots = roots
        self.process: subprocess.Popen[bytes] | None = None
        self.environment = {
            **{key: text for key, text in os.environ.items() if not key.startswith("TEVATRON_")},
            **SHORT_TIMES,
            "TEVATRON_HOME": str(home),
            "NO_COLOR": "1",
        }

    def up(self, *more: str) -> Client:
        """Start it and wait until it is ready."""
        roots = [word for root in self.roots for word in ("--root", str(root))]
        with (self.home.parent / "up.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*COMMAND, "up", *roots, *more], env=self.environment, stdout=log, stderr=log
            )
        pid = self.process.pid
        wait_for(
            lambda: (found := read_stack_file(self.home)) and found["pid"] == pid,
            timeout_s=150,
            what="the stack",
        )
        return Client(self.file["url"])

    @property
    def file(self) -> dict:
        found = read_stack_file(self.home)
        assert found is not None
        return found

    def processes(self) -> list[psutil.Process]:
        """Return `up` and all that descends from it."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    def kill(self) -> list[psutil.Process]:
        """Kill `up` alone, with SIGKILL; returns what ran before."""
        assert self.process is not None
        before = self.processes()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        return before

    def stop(self) -> int:
        """Stop it as Ctrl-C does; returns its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=60)

    def run(self, *words: str, timeout_s: float = 180) -> subprocess.CompletedProcess[str]:
        """Run the command against it."""
        return subprocess.run(
            [*COMMAND, *words],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def left_over(processes: list[psutil.Process], *, timeout_s: float = 10) -> list[str]:
    """Return the command lines of those that still run after a while."""
    deadline = time.monotonic() + timeout_s
    while (alive := [found for found in processes if is_alive(found)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    return [" ".join(found.cmdline()) for found in alive]


@contextmanager
def stack_in(folder: Path, *, root: Path) -> Iterator[Stack]:
    """Yield a stack in a path with blanks, not started yet; ended whatever happens."""
    home = folder / "a home with blanks" / "tevatron"
    home.parent.mkdir()
    stack = Stack(home, [root])
    yield stack
    if stack.process is not None and stack.process.poll() is None:
        processes = stack.kill()
        assert left_over(processes) == []


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A stack of this test's own, not started yet."""
    with stack_in(tmp_path, root=tmp_path) as stack:
        yield stack


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def tiny_model(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """A random two-layer model, below the stack's root."""
    return Path(shutil.copytree(tiny_model_folder, tmp_path / "tiny"))


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A BEIR folder of three passages and three queries, below the stack's root."""
    folder = tmp_path / "sample"
    (folder / "qrels").mkdir(parents=True)
    passages = {
        "p1": "Green tea is steeped below boiling point.",
        "p2": "A bishop moves along the diagonals of the board.",
        "p3": "Glaciers carve valleys as they flow downhill.",
    }
    queries = {"q1": "how hot for green tea", "q2": "how a bishop moves", "q3": "what glaciers do"}
    write_lines(
        folder / "corpus.jsonl", [{"_id": k, "title": "", "text": t} for k, t in passages.items()]
    )
    write_lines(folder / "queries.jsonl", [{"_id": k, "text": t} for k, t in queries.items()])
    pairs = [("q1", "p1"), ("q2", "p2"), ("q3", "p3")]
    rows = "".join(f"{query}\t{passage}\t1\n" for query, passage in pairs)
    (folder / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{rows}")
    training = [
        {
            "query_id": query,
            "query": queries[query],
            "positive_passages": [{"docid": positive, "title": "", "text": passages[positive]}],
            "negative_passages": [
                {"docid": other, "title": "", "text": text}
                for other, text in passages.items()
                if other != positive
            ],
        }
        for query, positive in pairs
    ]
    write_lines(tmp_path / "train.jsonl", training)
    return folder


def write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
