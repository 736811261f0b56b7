"""A node's place by its environment, torchrun's arguments, the notes and what they say of an attempt's end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tevatron.core.errors import ConfigError
from tevatron.trainer.launchers.cluster import attempt_name, count_nodes
from tevatron.trainer.launchers.manifests import merged
from tevatron.trainer.launchers.node import Place, read_place, torchrun_arguments
from tevatron.trainer.launchers.notes import NodeEnd, Notes, Watch, WatchReader, judge

PET = {
    "PET_NNODES": "4",
    "PET_NODE_RANK": "3",
    "PET_MASTER_ADDR": "a-node-0-0.a",
    "PET_MASTER_PORT": "29400",
}
LWS = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader"}
SLURM = {"SLURM_NNODES": "2", "SLURM_NODEID": "0", "MASTER_ADDR": "n0", "MASTER_PORT": "20017"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        (PET, Place(4, 3, "a-node-0-0.a", 29400)),
        (LWS, Place(2, 1, "leader", 29500)),
        (SLURM, Place(2, 0, "n0", 20017)),
        ({**SLURM, **PET}, Place(4, 3, "a-node-0-0.a", 29400)),
        ({}, Place(1, 0, "127.0.0.1", 29500)),
    ],
)
def test_a_node_finds_its_place(environment: dict[str, str], place: Place) -> None:
    assert read_place(environment) == place


def test_half_a_place_is_an_error_that_names_what_lacks() -> None:
    with pytest.raises(ConfigError, match="SLURM_NNODES=2: expected MASTER_ADDR beside it"):
        read_place({"SLURM_NNODES": "2", "SLURM_NODEID": "0"})


def test_nodes_meet_statically_and_one_node_alone_at_a_free_port() -> None:
    assert torchrun_arguments(Place(2, 1, "n0", 20017), ranks_per_node=8) == [
        *("--nnodes", "2", "--node-rank", "1", "--master-addr", "n0", "--master-port", "20017"),
        *("--rdzv-conf", "timeout=3600", "--nproc-per-node", "8"),
    ]
    assert torchrun_arguments(Place(1, 0, "n0", 1), ranks_per_node=2) == [
        *("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")
    ]


@pytest.mark.parametrize(
    ("num_processes", "num_nodes", "gpus_per_node", "found"),
    [(16, None, 8, 2), (4, None, 8, 1), (4, 2, 8, 2), (4, None, 0, 1), (4, 2, 0, 2), (12, 3, 4, 3)],
)
def test_nodes_are_as_few_as_have_the_gpus(
    num_processes: int, num_nodes: int | None, gpus_per_node: int, found: int
) -> None:
    assert found == count_nodes(
        num_processes=num_processes, num_nodes=num_nodes, gpus_per_node=gpus_per_node
    )


@pytest.mark.parametrize(
    ("num_processes", "num_nodes", "gpus_per_node", "message"),
    [
        (9, None, 8, r"num_nodes\(2\) must divide num_processes\(9\)"),
        (16, 1, 8, r"on num_nodes\(1\): expected at most 8 ranks a node, .* got 16"),
    ],
)
def test_ranks_that_do_not_fit_the_nodes_are_refused(
    num_processes: int, num_nodes: int | None, gpus_per_node: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        count_nodes(num_processes=num_processes, num_nodes=num_nodes, gpus_per_node=gpus_per_node)


def test_an_attempts_name_is_fit_for_each_scheduler() -> None:
    assert attempt_name("job_019ad3f2c4b1a7d2e3f4a5b6:12") == "tevatron-019ad3f2c4b1a7d2e3f4a5b6-12"


WELL = NodeEnd(time_s=5, status=0)
FAILED = NodeEnd(time_s=2, status=1, message="rank 0 ended with status 1")
KILLED = NodeEnd(time_s=3, status=1, killed=True, message="rank 2 was killed by SIGKILL")
SAVING = NodeEnd(time_s=4, status=None, told=True)
TOLD = NodeEnd(time_s=4, status=1, told=True, killed=True, message="torchrun was killed")


@pytest.mark.parametrize(
    ("ends", "status", "killed", "message"),
    [
        ({0: WELL, 1: WELL}, 0, False, "every node ended well"),
        ({0: FAILED, 1: SAVING}, 1, False, "node 0: rank 0 ended with status 1"),
        ({0: FAILED, 1: TOLD}, 1, False, "node 0: rank 0 ended with status 1"),
        ({0: FAILED, 1: KILLED}, 1, True, "node 0: rank 0 ended with status 1"),
        ({0: FAILED}, 1, True, "node 1 left no word; node 0: rank 0 ended with status 1"),
        ({0: SAVING, 1: TOLD}, 1, True, "nodes [0, 1] were told to stop"),
        ({}, 1, True, "node 0 left no word; node 1 left no word"),
    ],
)
def test_an_end_is_judged_by_its_first_cause(
    ends: dict[int, NodeEnd], status: int, killed: bool, message: str
) -> None:
    ended = judge(ends, num_nodes=2)
    assert (ended.status, ended.killed, ended.message) == (status, killed, message)


def test_notes_keep_the_ends_and_pass_over_a_broken_one(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "attempt-1.log")
    assert notes.num_nodes() is None
    notes.begin(num_nodes=2)
    notes.write_end(1, FAILED)
    (notes.folder / "node-0.json").write_text('{"time')
    again = Notes(tmp_path / "attempt-1.log")
    assert (again.num_nodes(), again.ends()) == (2, {1: FAILED})
    assert again.node_log(0) == tmp_path / "attempt-1.log"
    assert again.node_log(1) == tmp_path / "attempt-1.nodes" / "node-1.log"


def test_a_node_sees_whether_it_is_watched_by_its_own_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    notes = Notes(tmp_path / "attempt-1.log")
    notes.begin(num_nodes=1)
    reader = WatchReader(notes, unwatched_s=10)
    assert reader.read() is Watch.WATCHED
    clock[0] += 9
    assert reader.read() is Watch.WATCHED
    notes.renew()
    clock[0] += 9
    assert reader.read() is Watch.WATCHED
    clock[0] += 10
    assert reader.read() is Watch.UNWATCHED
    (notes.folder / "watched").unlink()
    assert reader.read() is Watch.UNWATCHED
    notes.give_up()
    assert reader.read() is Watch.OVER


def test_an_operators_part_of_the_pod_is_merged_into_ours() -> None:
    ours = {
        "restartPolicy": "Never",
        "containers": [{"name": "node", "env": [{"name": "A", "value": "1"}], "image": "i"}],
        "volumes": [{"name": "data"}],
    }
    theirs = {
        "nodeSelector": {"gpu": "h200"},
        "containers": [{"env": [{"name": "NCCL_DEBUG", "value": "INFO"}]}],
        "volumes": [{"name": "fast"}],
    }
    assert merged(ours, theirs) == {
        "restartPolicy": "Never",
        "nodeSelector": {"gpu": "h200"},
        "containers": [
            {
                "name": "node",
                "env": [{"name": "A", "value": "1"}, {"name": "NCCL_DEBUG", "value": "INFO"}],
                "image": "i",
            }
        ],
        "volumes": [{"name": "data"}, {"name": "fast"}],
    }
