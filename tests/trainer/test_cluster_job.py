"""Train jobs on a cluster, through the real runner, Postgres and torchrun on two nodes, with a stand-in for the program.

The cluster's API server is a fake whose pods are real processes; a real Slurm is in launchers/test_slurm.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.processes import wait_for
from tests.support.train_bench import SUPPORT, Bench

from tevatron.core.contracts.jobs import JobState
from tevatron.core.process import end_processes, processes_with_marker
from tevatron.core.settings import Settings
from tevatron.core.store.session import Sessions
from tevatron.trainer.launchers.jobset import JobsetLauncher

pytest.importorskip("lightkube")
pytestmark = [pytest.mark.db, pytest.mark.timeout(600)]


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    found = FakeKubernetes(tmp_path, run_pods=True)
    with found.serving() as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield found


@pytest.fixture
def bench(
    settings: Settings,
    sessions: Sessions,
    checkpoint_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kubernetes: FakeKubernetes,
) -> Iterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT), prepend=":")
    settings = settings.model_copy(
        update={"jobset_image": "image", "poll_s": 0.05, "stop_grace_s": 30.0, "lease_s": 60.0}
    )
    found = Bench(settings, sessions, checkpoint_folder, monkeypatch)
    found.make_launcher = JobsetLauncher
    found.behave()
    yield found
    for job_id in found.job_ids:
        assert processes_with_marker(f"{job_id}:") == []
        end_processes(f"{job_id}:", 0)


def name_of(job_id: str, attempt: int = 1) -> str:
    return f"tevatron-{job_id.removeprefix('job_')}-{attempt}"


def test_a_worker_goes_and_another_one_watches_the_same_ranks_to_their_end(
    bench: Bench, kubernetes: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    bench.behave(steps=60, step_s=0.1, save_steps=1000)
    job_id = bench.train(num_processes=4, num_nodes=2)
    with bench.working():
        bench.wait_for_step(job_id, 2)
        bench.shutdown = True
    assert bench.job(job_id).state == JobState.QUEUED
    [jobset] = kubernetes.jobsets.values()
    assert [pod.code for pod in jobset.pods] == [None, None]
    bench.shutdown = False
    assert bench.work()
    job = bench.job(job_id)
    assert (job.state, job.attempt, job.lost_attempts) == (JobState.SUCCEEDED, 2, 0)
    # Nothing is trained twice, nothing is missed, nothing is left.
    assert bench.steps(job_id, 1) + bench.steps(job_id, 2) == list(range(1, 61))
    assert len([line for line in kubernetes.requests if line.startswith("POST")]) == 1
    assert kubernetes.jobsets == {}
    assert list(temporary.iterdir()) == []
    log = (bench.run(job_id) / "attempt-2.log").read_text()
    assert "stand-in rank 1 of 4 runs" in log
    assert "stand-in rank 2 of 4 runs" not in log
    other = bench.run(job_id) / "attempt-1.nodes" / "node-1.log"
    assert "stand-in rank 3 of 4 runs" in other.read_text()


def test_a_lost_node_is_another_attempt_from_the_last_saved_state(
    bench: Bench, kubernetes: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tevatron.trainer.launchers import cluster, jobset

    monkeypatch.setattr(cluster, "_SETTLE_S", 0.5)
    monkeypatch.setattr(jobset, "_GONE_MARGIN_S", -29.0)
    bench.behave(steps=40, step_s=0.1, save_steps=5)
    job_id = bench.train(num_processes=2, num_nodes=2)
    with bench.working():
        bench.wait_for_step(job_id, 12)
        kubernetes.lose_node(name_of(job_id), 1)
    job = bench.job(job_id)
    assert (job.state, job.lost_attempts) == (JobState.QUEUED, 1)
    assert "node 1 left no word" in str(job.message)
    assert bench.work()
    assert (bench.job(job_id).state, bench.job(job_id).attempt) == (JobState.SUCCEEDED, 2)
    assert bench.steps(job_id, 2)[0] >= 11


def test_a_failure_keeps_the_reason_that_the_program_gave(
    bench: Bench, kubernetes: FakeKubernetes
) -> None:
    bench.behave(
        steps=1000,
        step_s=0.05,
        save_steps=1000,
        at_step={"2": "fail:out_of_memory"},
        ranks=[0],
    )
    job_id = bench.train(num_processes=2, num_nodes=2)
    assert bench.work()
    job = bench.job(job_id)
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "out_of_memory", "training")
    assert kubernetes.jobsets == {}


def test_cancel_ends_every_pod(bench: Bench, kubernetes: FakeKubernetes) -> None:
    bench.behave(steps=1000, step_s=0.05, save_steps=1000, deaf=True)
    job_id = bench.train(num_processes=2, num_nodes=2)
    with bench.working():
        bench.wait_for_step(job_id, 2)
        bench.cancel(job_id)
    assert bench.job(job_id).state == JobState.CANCELLED
    assert kubernetes.jobsets == {}
    assert processes_with_marker(f"{job_id}:") == []
    assert not bench.work()


def test_ranks_that_nobody_watches_save_their_state_and_end(
    bench: Bench, kubernetes: FakeKubernetes
) -> None:
    bench.settings = bench.settings.model_copy(update={"unwatched_s": 6.0})
    bench.behave(steps=10000, step_s=0.1, save_steps=10000)
    job_id = bench.train(num_processes=2, num_nodes=2)
    with bench.working():
        bench.wait_for_step(job_id, 2)
        bench.shutdown = True
    wait_for(
        lambda: processes_with_marker(f"{job_id}:") == [],
        timeout_s=120,
        what="the end of the ranks",
    )
    assert len(list(bench.run(job_id).glob("states/step-*"))) == 1
    assert bench.job(job_id).state == JobState.QUEUED
