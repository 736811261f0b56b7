"""The slurm launcher: its batch file, and train jobs on a real Slurm of two nodes with a stand-in for the program."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import slurm as real_slurm
from tests.support.processes import wait_for
from tests.support.slurm import Slurm, running_slurm
from tests.support.train_bench import SUPPORT, Bench

from tevatron.core.contracts.jobs import JobState
from tevatron.core.errors import ConfigError
from tevatron.core.process import end_processes, processes_with_marker
from tevatron.core.settings import Settings
from tevatron.core.store.session import Sessions
from tevatron.trainer.launchers.base import Launch
from tevatron.trainer.launchers.slurm import Batch, SlurmLauncher, batch_file
from tevatron.trainer.main import main

needs_slurm = pytest.mark.skipif(real_slurm.missing() is not None, reason=str(real_slurm.missing()))

FILE = """\
#!/bin/bash
#SBATCH --job-name=tevatron-019a-1
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --output=/data/runs/job_019a/attempt-1.slurm.log
#SBATCH --open-mode=append
#SBATCH --no-requeue
#SBATCH --gpus-per-node=8
#SBATCH --partition=gpu
#SBATCH --time=240
#SBATCH --signal=TERM@75
#SBATCH --account=lab
#SBATCH --qos=long
export TEVATRON_ATTEMPT=job_019a:1
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
exec srun --kill-on-bad-exit=1 python -m module '/data/with blank'
"""


def test_the_batch_file() -> None:
    settings = Settings(
        slurm_partition="gpu",
        slurm_gpus_per_node=8,
        slurm_time_min=240,
        slurm_options="--account=lab --qos=long",
    )
    batch = Batch(
        name="tevatron-019a-1",
        command=["python", "-m", "module", "/data/with blank"],
        num_nodes=2,
        ranks_per_node=8,
        output="/data/runs/job_019a/attempt-1.slurm.log",
        variables={"TEVATRON_ATTEMPT": "job_019a:1"},
    )
    assert batch_file(settings, batch) == FILE


def test_the_command_prints_the_batch_file_of_a_driver(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEVATRON_SLURM_GPUS_PER_NODE", "8")
    monkeypatch.setenv("TEVATRON_SLURM_PYTHON", "/shared/venv/bin/python")
    driver = ["tevatron.reranker.driver.train", "--output_dir", "out"]
    assert main(["sbatch", "--num_processes", "16", "--dry_run", *driver]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"#SBATCH --nodes=2", "#SBATCH --output=tevatron-%j.log"} < set(lines)
    assert lines[-1] == (
        "exec srun --kill-on-bad-exit=1 /shared/venv/bin/python -m tevatron.trainer.launchers.node "
        "--ranks-per-node 8 --stop-grace-s 60 tevatron.reranker.driver.train --output_dir out"
    )


def test_a_command_that_cannot_be_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sbatch", "--num_processes", "3", "--num_nodes", "2", "--dry_run", "module"]) == 1
    assert capsys.readouterr().err == "num_nodes(2) must divide num_processes(3)\n"


def test_without_slurms_programs_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    launch = Launch(
        module="module",
        config_path=tmp_path / "config.json",
        run_folder=tmp_path,
        log_path=tmp_path / "attempt-1.log",
        marker="job_019a:1",
        num_processes=1,
    )
    with pytest.raises(ConfigError, match="launcher 'slurm': squeue is not on this machine's PATH"):
        SlurmLauncher(Settings(home=tmp_path)).start(launch)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    # A short path: it holds a socket.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, running_slurm(Path(folder)) as up:
        yield up


@pytest.fixture
def bench(
    settings: Settings,
    sessions: Sessions,
    checkpoint_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    slurm: Slurm,
) -> Iterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=":")
    for name, text in slurm.environment().items():
        monkeypatch.setenv(name, text)
    settings = settings.model_copy(update={"poll_s": 0.1, "stop_grace_s": 30.0, "lease_s": 60.0})
    found = Bench(settings, sessions, checkpoint_folder, monkeypatch)
    found.make_launcher = SlurmLauncher
    found.behave()
    yield found
    for job_id in found.job_ids:
        assert processes_with_marker(f"{job_id}:") == []
        end_processes(f"{job_id}:", 0)


def states(slurm: Slurm, job_id: str) -> list[str]:
    name = f"tevatron-{job_id.removeprefix('job_')}-1"
    return slurm.call("squeue", "--noheader", "--states=all", "-o", "%T", "--name", name).split()


def entry_of_node(job_id: str, node: int) -> int:
    """Return the first process of a node's step."""
    wanted = f"SLURM_NODEID={node}".encode()
    marked = processes_with_marker(f"{job_id}:")
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in marked}
    return min(pid for pid, variables in environments.items() if wanted in variables)


@needs_slurm
@pytest.mark.timeout(600)
def test_the_command_submits_a_driver_without_the_platform(
    slurm: Slurm,
    tmp_path: Path,
    checkpoint_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=":")
    monkeypatch.setenv("STAND_IN", json.dumps({"export": str(checkpoint_folder)}))
    for name, text in slurm.environment().items():
        monkeypatch.setenv(name, text)
    config = tmp_path / "run" / "config.json"
    config.parent.mkdir()
    assert main(["sbatch", "--name", "plain", "stand_in_program", str(config)]) == 0
    job = capsys.readouterr().out.strip()
    wait_for(
        lambda: (
            slurm.call("squeue", "--noheader", "--states=all", "-o", "%T", "-j", job).strip()
            == "COMPLETED"
        ),
        timeout_s=300,
        what="the end of the job",
    )
    assert "stand-in rank 0 of 1 runs" in (tmp_path / f"plain-{job}.log").read_text()
    assert (config.parent / "export" / "reranker.json").is_file()


@needs_slurm
@pytest.mark.db
@pytest.mark.timeout(600)
def test_a_train_job_runs_on_two_nodes(bench: Bench, slurm: Slurm) -> None:
    job_id = bench.train(num_processes=4, num_nodes=2)
    assert bench.work()
    job = bench.job(job_id)
    assert (job.state, job.attempt, job.message) == (JobState.SUCCEEDED, 1, None)
    assert bench.steps(job_id, 1) == [1, 2, 3, 4]
    assert states(slurm, job_id) == ["COMPLETED"]
    assert "stand-in rank 0 of 4 runs" in (bench.run(job_id) / "attempt-1.log").read_text()
    other = bench.run(job_id) / "attempt-1.nodes" / "node-1.log"
    assert "stand-in rank 2 of 4 runs" in other.read_text()


@needs_slurm
@pytest.mark.db
@pytest.mark.timeout(600)
def test_cancel_ends_every_step(bench: Bench, slurm: Slurm) -> None:
    bench.behave(steps=1000, step_s=0.05, save_steps=1000, deaf=True)
    job_id = bench.train(num_processes=2, num_nodes=2)
    with bench.working():
        bench.wait_for_step(job_id, 2)
        bench.cancel(job_id)
    assert bench.job(job_id).state == JobState.CANCELLED
    assert states(slurm, job_id) == ["CANCELLED"]
    assert processes_with_marker(f"{job_id}:") == []


@needs_slurm
@pytest.mark.db
@pytest.mark.full
@pytest.mark.timeout(600)
def test_killed_processes_of_a_node_are_another_attempt_that_resumes(
    bench: Bench, slurm: Slurm
) -> None:
    bench.behave(steps=40, step_s=0.1, save_steps=5)
    job_id = bench.train(num_processes=2, num_nodes=2)
    with bench.working():
        bench.wait_for_step(job_id, 12)
        os.kill(entry_of_node(job_id, 1), signal.SIGKILL)
    job = bench.job(job_id)
    assert (job.state, job.lost_attempts) == (JobState.QUEUED, 1)
    assert "is FAILED" in str(job.message)
    assert "node 1 left no word" in str(job.message)
    assert bench.work()
    assert (bench.job(job_id).state, bench.job(job_id).attempt) == (JobState.SUCCEEDED, 2)
    assert bench.steps(job_id, 2)[0] >= 11


@needs_slurm
@pytest.mark.db
@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_worker_goes_and_another_one_watches_the_same_steps(bench: Bench, slurm: Slurm) -> None:
    bench.behave(steps=40, step_s=0.1, save_steps=1000)
    job_id = bench.train(num_processes=2, num_nodes=2)
    with bench.working():
        bench.wait_for_step(job_id, 2)
        bench.shutdown = True
    wait_for(lambda: bench.job(job_id).state == JobState.QUEUED, what="the release")
    assert states(slurm, job_id) == ["RUNNING"]
    bench.shutdown = False
    assert bench.work()
    assert (bench.job(job_id).state, bench.job(job_id).attempt) == (JobState.SUCCEEDED, 2)
    assert bench.steps(job_id, 1) + bench.steps(job_id, 2) == list(range(1, 41))
    assert states(slurm, job_id) == ["COMPLETED"]
