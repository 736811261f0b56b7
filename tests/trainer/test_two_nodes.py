"""Megatron on two nodes with a network between them, EP over both, started as JobSet and as a real Slurm start it.

The nodes are network namespaces. Two or four ranks meet by the launcher's own command line and environment; one node's
processes are killed, and the next attempt goes on from the saved state.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import netns
from tests.support import slurm as real_slurm
from tests.support.fake_kubernetes import FakeKubernetes
from tests.support.megatron_worker import Worker, megatron_python
from tests.support.netns import Nodes
from tests.support.slurm import running_slurm

from tevatron.core.contracts.jobs import JobState
from tevatron.core.process import end_processes, processes_with_marker
from tevatron.core.settings import Settings
from tevatron.core.store.session import Sessions
from tevatron.trainer.launchers.jobset import JobsetLauncher
from tevatron.trainer.launchers.slurm import SlurmLauncher

pytestmark = [pytest.mark.db, pytest.mark.megatron, pytest.mark.timeout(1800)]
START_S = 900


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    why = netns.missing()
    if why is not None:
        pytest.skip(why)
    with netns.nodes(2, tmp_path) as found:
        yield found


@pytest.fixture
def worker(
    settings: Settings, sessions: Sessions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Worker]:
    python = megatron_python(tmp_path)
    monkeypatch.setenv("POD_PYTHON", str(python))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = Worker(
        settings.model_copy(
            update={
                "megatron_python": python,
                "jobset_megatron_image": "image",
                "lease_s": 120.0,
            }
        ),
        sessions,
        kind="qwen3_moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        head_dim=16,
    )
    yield found
    for job_id in found.job_ids:
        assert processes_with_marker(f"{job_id}:") == []
        end_processes(f"{job_id}:", 0)


def entry_of_node(job_id: str, variable: str) -> int:
    """Return the first process of the node with this variable in its environment."""
    found = [
        pid
        for pid in processes_with_marker(f"{job_id}:")
        if variable.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    ]
    return min(found)


def loses_a_node_and_resumes(worker: Worker, *, num_ranks: int, second_node: str) -> None:
    experts = {"expert_model_parallel_size": num_ranks}
    job_id = worker.submit(num_processes=num_ranks, num_nodes=2, megatron=experts)
    with worker.working(end_s=300) as thread:
        worker.wait_for_step(job_id, 5, working=thread, timeout_s=START_S)
        os.kill(entry_of_node(job_id, second_node), signal.SIGKILL)
    job = worker.job(job_id)
    assert (job.state, job.lost_attempts) == (JobState.QUEUED, 1), job.message
    assert "node 1 left no word" in str(job.message)
    assert worker.work()
    job = worker.job(job_id)
    assert (job.state, job.attempt, job.message) == (JobState.SUCCEEDED, 2, None)
    again = worker.steps(job_id, 2)
    assert again == list(range(again[0], 15))
    assert again[0] >= 3


@pytest.mark.full
def test_as_jobset_starts_them(
    worker: Worker, nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightkube")
    worker.make_launcher = JobsetLauncher
    kubernetes = FakeKubernetes(
        tmp_path, run_pods=True, prefix=nodes.prefix, address=nodes.addresses[0]
    )
    with kubernetes.serving() as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        loses_a_node_and_resumes(worker, num_ranks=4, second_node="PET_NODE_RANK=1")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_as_slurm_starts_them(
    worker: Worker, nodes: Nodes, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    why = real_slurm.missing()
    if why is not None:
        pytest.skip(why)
    worker.make_launcher = SlurmLauncher
    nodes.reach()
    with (
        tempfile.TemporaryDirectory(prefix="slurm-") as folder,
        running_slurm(
            Path(folder),
            addresses=nodes.addresses,
            controller=f"localhost({netns.CONTROLLER})",
            port=17817,
            prefix=nodes.prefix,
        ) as slurm,
    ):
        for name, text in slurm.environment().items():
            monkeypatch.setenv(name, text)
        loses_a_node_and_resumes(worker, num_ranks=num_ranks, second_node="SLURM_NODEID=1")
