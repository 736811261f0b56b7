"""The local launcher with real torchrun and a stand-in program."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig

from tevatron.core.errors import ConfigError
from tevatron.core.ids import new_id
from tevatron.core.process import end_processes, parent_pid, processes_with_marker
from tevatron.core.settings import Settings
from tevatron.trainer.launchers import AttachedHandle, Exit, Launch
from tevatron.trainer.launchers.local import LocalLauncher

SUPPORT = Path(__file__).parents[2] / "support"

Start = Callable[..., tuple[AttachedHandle, Launch]]


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


def wait_for_exit(handle: AttachedHandle, *, timeout_s: float = 60.0) -> Exit:
    deadline = time.monotonic() + timeout_s
    while (ended := handle.poll()) is None:
        assert time.monotonic() < deadline, "did not end in time"
        time.sleep(0.05)
    return ended


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    marker = f"{new_id('job')}:1"
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))

    def run(*, num_processes: int = 1, **behaviour: object) -> tuple[AttachedHandle, Launch]:
        monkeypatch.setenv("STAND_IN", json.dumps(behaviour))
        (tmp_path / "config.json").write_text("{}")
        launch = Launch(
            module="stand_in_program",
            config_path=tmp_path / "config.json",
            run_folder=tmp_path,
            log_path=tmp_path / "attempt-1.log",
            marker=marker,
            num_processes=num_processes,
        )
        settings = Settings(home=tmp_path, devices="cpu", stop_grace_s=5)
        return LocalLauncher(settings).start(launch), launch

    yield run
    end_processes(marker, 0)


def test_two_ranks_run_to_their_end_and_leave_their_output_in_the_log(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    handle, launch = start(num_processes=2, export=str(tmp_path / "source"))
    ended = wait_for_exit(handle)
    assert (ended.status, ended.killed) == (0, False)
    handle.end(grace_s=0)
    log = launch.log_path.read_text()
    assert "stand-in rank 0 of 2 runs" in log
    assert "stand-in rank 1 of 2 runs" in log
    assert processes_with_marker(launch.marker) == []
    assert not (tmp_path / "torchrun").exists()


def test_a_killed_rank_is_told_from_a_failing_one_although_its_sibling_fails_too(
    start: Start,
) -> None:
    handle, launch = start(num_processes=2, step_s=0.2, steps=500, at_step={"2": "kill"}, ranks=[1])
    ended = wait_for_exit(handle)
    assert (ended.status, ended.killed) == (1, True)
    assert "rank 1 was killed by SIGKILL" in ended.message
    handle.end(grace_s=0)
    assert processes_with_marker(launch.marker) == []


def test_a_rank_that_raises_was_not_killed(start: Start) -> None:
    handle, _ = start(num_processes=2, step_s=0.1, at_step={"2": "raise"}, ranks=[0], steps=500)
    ended = wait_for_exit(handle)
    assert (ended.status, ended.killed) == (1, False)
    assert ended.message.startswith("rank 0 ended with status 1")
    assert ended.message.endswith("RuntimeError: the stand-in was told to raise")
    handle.end(grace_s=0)


def test_killed_torchrun_takes_its_ranks_along(start: Start) -> None:
    handle, launch = start(num_processes=2, steps=5000, deaf=True)
    wait_until(lambda: len(processes_with_marker(launch.marker)) == 3)
    marked = processes_with_marker(launch.marker)
    [torchrun] = [pid for pid in marked if parent_pid(pid) not in marked]
    os.kill(torchrun, signal.SIGKILL)
    ended = wait_for_exit(handle)
    assert (ended.status, ended.killed) == (-9, True)
    assert ended.message.startswith("torchrun was killed by SIGKILL; the log ends:\n")
    wait_until(lambda: processes_with_marker(launch.marker) == [], timeout_s=5)
    handle.end(grace_s=0)


def test_asked_to_stop_the_ranks_save_and_end_well(start: Start, tmp_path: Path) -> None:
    handle, launch = start(num_processes=2, steps=5000, save_steps=5000)
    events = tmp_path / "events.jsonl"
    wait_until(lambda: events.exists() and '"step": 3' in events.read_text())
    handle.ask_to_stop()
    ended = wait_for_exit(handle)
    assert (ended.status, ended.killed) == (0, False)
    handle.end(grace_s=0)
    assert json.loads(events.read_text().splitlines()[-1])["type"] == "stopped"
    assert len(list((tmp_path / "states").iterdir())) == 1
    assert processes_with_marker(launch.marker) == []


def test_end_kills_ranks_that_do_not_listen_within_the_grace(start: Start, tmp_path: Path) -> None:
    handle, launch = start(num_processes=2, steps=5000, deaf=True)
    events = tmp_path / "events.jsonl"
    wait_until(lambda: events.exists() and '"step": 3' in events.read_text())
    began = time.monotonic()
    handle.end(grace_s=0.5)
    assert 0.5 <= time.monotonic() - began < 5
    assert processes_with_marker(launch.marker) == []
    assert handle.poll() is not None


def test_adopt_ends_an_earlier_attempt(start: Start, tmp_path: Path) -> None:
    handle, launch = start(steps=5000)
    wait_until(lambda: len(processes_with_marker(launch.marker)) == 2)
    job_id = launch.marker.partition(":")[0]
    assert LocalLauncher(Settings(home=tmp_path)).adopt(job_id, run_folder=tmp_path) is None
    assert processes_with_marker(launch.marker) == []
    handle.end(grace_s=0)


def test_ranks_get_no_secrets_and_only_the_devices_of_the_worker(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEVATRON_DATABASE_URL", "postgresql+psycopg://user:canary@host/db")
    monkeypatch.setenv("PGPASSWORD", "canary")
    monkeypatch.setenv("HF_TOKEN", "canary")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    handle, launch = start(num_processes=64, at_step={"1": "hang"}, steps=1)
    wait_until(lambda: processes_with_marker(launch.marker) != [])
    [pid, *_] = processes_with_marker(launch.marker)
    environment = dict(
        line.split("=", 1)
        for line in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if "=" in line
    )
    handle.end(grace_s=0)
    assert [name for name in environment if name.startswith("TEVATRON_")] == ["TEVATRON_ATTEMPT"]
    assert not [name for name, text in environment.items() if "canary" in text]
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize("trackers", [["wandb"], []])
def test_ranks_get_the_key_of_a_tracker_that_the_run_reports_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trackers: list[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "k")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "t")
    launch = Launch(
        module="stand_in_program",
        config_path=tmp_path / "config.json",
        run_folder=tmp_path,
        log_path=tmp_path / "attempt-1.log",
        marker="job_019a:1",
        num_processes=1,
        trackers=trackers,
    )
    environment = LocalLauncher(Settings(home=tmp_path))._environment(launch)
    assert environment.get("WANDB_API_KEY") == ("k" if trackers else None)
    assert "MLFLOW_TRACKING_TOKEN" not in environment


def test_torchrun_lets_ranks_save_for_as_long_as_a_shutdown_may_take(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    handle, launch = start(steps=1)
    wait_for_exit(handle)
    handle.end(grace_s=0)
    environment = LocalLauncher(Settings(home=tmp_path, stop_grace_s=90.5))._environment(launch)
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    assert environment[name] == "106"
    # What torchrun makes of it: without, it kills the ranks 30 s after SIGTERM.
    monkeypatch.setenv(name, environment[name])
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1)
    assert config.shutdown_timeout == 106


@pytest.mark.parametrize(
    ("devices", "num_processes", "fits"),
    [(None, 8, True), ("cpu", 2, True), ("0,1", 2, True), ("0,1", 3, False), ("5", 2, False)],
)
def test_more_ranks_than_devices_are_refused(
    devices: str | None, num_processes: int, fits: bool
) -> None:
    launcher = LocalLauncher(Settings(devices=devices))
    if fits:
        launcher.check(num_processes=num_processes, num_nodes=None)
    else:
        with pytest.raises(ConfigError, match=f"TEVATRON_DEVICES={devices}.*got {num_processes}"):
            launcher.check(num_processes=num_processes, num_nodes=None)


def test_several_nodes_are_refused() -> None:
    launcher = LocalLauncher(Settings())
    launcher.check(num_processes=2, num_nodes=1)
    with pytest.raises(ConfigError, match=r"num_nodes: expected 1.*'local', got 2"):
        launcher.check(num_processes=2, num_nodes=2)
