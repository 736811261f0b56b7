"""The jobset launcher against an API server over HTTP; the pods themselves run in test_cluster_job.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.fake_kubernetes import FakeKubernetes

from tevatron.core.errors import ConfigError
from tevatron.core.settings import Settings
from tevatron.trainer.launchers import cluster as cluster_module
from tevatron.trainer.launchers import jobset as jobset_module
from tevatron.trainer.launchers.base import AttachedHandle, ClusterUnreachableError, Launch
from tevatron.trainer.launchers.jobset import JobsetLauncher
from tevatron.trainer.launchers.notes import NodeEnd, Notes

pytest.importorskip("lightkube")

NAME = "tevatron-019a-1"


@pytest.fixture
def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    monkeypatch.setattr(cluster_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(cluster_module, "_SETTLE_S", 0.0)
    monkeypatch.setattr(jobset_module, "_GONE_MARGIN_S", 0.2)
    found = FakeKubernetes(tmp_path)
    with found.serving() as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield found


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(
        home=tmp_path,
        jobset_image="tevatron/trainer:1",
        jobset_gpus_per_node=2,
        poll_s=0.0,
        stop_grace_s=0.1,
    )


def make_launch(folder: Path, *, attempt: int = 1) -> Launch:
    return Launch(
        module="tevatron.reranker.driver.train",
        config_path=folder / "config.json",
        run_folder=folder,
        log_path=folder / f"attempt-{attempt}.log",
        marker=f"job_019a:{attempt}",
        num_processes=4,
    )


def test_an_attempt_that_was_submitted_before_is_taken(
    kubernetes: FakeKubernetes, settings: Settings, tmp_path: Path
) -> None:
    for _ in range(2):
        handle = JobsetLauncher(settings).start(make_launch(tmp_path))
        assert handle.poll() is None
    assert list(kubernetes.jobsets) == [NAME]
    assert len(kubernetes.jobsets[NAME].pods) == 2
    assert [line for line in kubernetes.requests if line.startswith("POST")] == [
        "POST /apis/jobset.x-k8s.io/v1alpha2/namespaces/tevatron/jobsets"
    ] * 2


def test_its_good_end_is_seen(
    kubernetes: FakeKubernetes, settings: Settings, tmp_path: Path
) -> None:
    handle = JobsetLauncher(settings).start(make_launch(tmp_path))
    kubernetes.jobsets[NAME].end_as("Completed", "jobset completed successfully")
    ended = handle.poll()
    assert ended is not None
    assert (ended.status, ended.killed) == (0, False)
    handle.end(grace_s=0)
    assert kubernetes.jobsets == {}


def test_a_failure_has_the_words_of_the_node_and_of_the_pod(
    kubernetes: FakeKubernetes, settings: Settings, tmp_path: Path
) -> None:
    handle = JobsetLauncher(settings).start(make_launch(tmp_path))
    notes = Notes(tmp_path / "attempt-1.log")
    notes.write_end(0, NodeEnd(time_s=2.0, status=None, told=True))
    notes.write_end(1, NodeEnd(time_s=1.0, status=1, message="rank 3 ended with status 1"))
    jobset = kubernetes.jobsets[NAME]
    jobset.pods[1].status = {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}
    jobset.end_as("Failed", "jobset failed due to one or more job failures")
    ended = handle.poll()
    assert ended is not None
    assert (ended.status, ended.killed) == (1, False)
    assert ended.message == (
        "jobset failed due to one or more job failures; "
        "pod tevatron-019a-1-node-0-1-abcde: Evicted low on memory; node 1: rank 3 ended with status 1"
    )


def test_a_lost_node_is_no_failure_of_the_program_and_its_pod_is_not_waited_for(
    kubernetes: FakeKubernetes, settings: Settings, tmp_path: Path
) -> None:
    handle = JobsetLauncher(settings).start(make_launch(tmp_path))
    notes = Notes(tmp_path / "attempt-1.log")
    notes.write_end(0, NodeEnd(time_s=1.0, status=1, message="rank 0 ended with status 1"))
    kubernetes.lose_node(NAME, 1)
    ended = handle.poll()
    assert ended is not None
    assert ended.killed
    assert "node 1 left no word; node 0: rank 0 ended with status 1" in ended.message
    handle.end(grace_s=0)
    assert kubernetes.jobsets[NAME].deleting
    # If its ranks do run on, they read there that they are over.
    assert notes.read_watch() == "over"
    again = JobsetLauncher(settings).start(make_launch(tmp_path, attempt=2))
    assert again.poll() is None


def test_another_worker_adopts_what_is_alive_and_ends_the_rest(
    kubernetes: FakeKubernetes, settings: Settings, tmp_path: Path
) -> None:
    launcher = JobsetLauncher(settings)
    for attempt in (1, 2):
        launcher.start(make_launch(tmp_path, attempt=attempt))
    other = JobsetLauncher(settings)
    assert other.adopt("job_019b", run_folder=tmp_path) is None
    handle = other.adopt("job_019a", run_folder=tmp_path)
    assert handle is not None
    assert not isinstance(handle, AttachedHandle)
    assert list(kubernetes.jobsets) == ["tevatron-019a-2"]
    assert handle.poll() is None
    kubernetes.jobsets["tevatron-019a-2"].end_as("Completed", "")
    ended = handle.poll()
    assert ended is not None
    assert ended.status == 0
    assert other.adopt("job_019a", run_folder=tmp_path) is None
    assert kubernetes.jobsets == {}


def test_a_server_that_does_not_answer_is_waited_for(
    kubernetes: FakeKubernetes,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = JobsetLauncher(settings)
    kubernetes.num_failures = 3
    handle = launcher.start(make_launch(tmp_path))
    assert list(kubernetes.jobsets) == [NAME]
    kubernetes.num_failures = 1
    assert handle.poll() is None
    monkeypatch.setattr(cluster_module, "_INSIST_S", 0.0)
    kubernetes.num_failures = 10**6
    with pytest.raises(ClusterUnreachableError, match=r"answers 503: .*leader changed"):
        launcher.adopt("job_019a", run_folder=tmp_path)


def test_what_is_deleted_from_outside_is_lost(
    kubernetes: FakeKubernetes, settings: Settings, tmp_path: Path
) -> None:
    handle = JobsetLauncher(settings).start(make_launch(tmp_path))
    del kubernetes.jobsets[NAME]
    ended = handle.poll()
    assert ended is not None
    assert ended.killed
    assert ended.message.startswith(f"{NAME} is gone; node 0 left no word; node 1 left no word")


def test_without_an_image_the_setting_is_named(
    kubernetes: FakeKubernetes, settings: Settings, tmp_path: Path
) -> None:
    launcher = JobsetLauncher(settings.model_copy(update={"jobset_image": None}))
    with pytest.raises(ConfigError, match="expected TEVATRON_JOBSET_IMAGE to name"):
        launcher.start(make_launch(tmp_path))


def test_without_a_cluster_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="launcher 'jobset': neither in a pod nor a kubeconfig"):
        JobsetLauncher(Settings(home=tmp_path))
