"""Train and export jobs through the real runner, Postgres and torchrun, with a stand-in for the training program."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hub import COMMIT, Hub, ask_at, pushes
from tests.support.processes import wait_for
from tests.support.train_bench import SUPPORT, Bench

from tevatron.core.contracts.checkpoint import CheckpointContract
from tevatron.core.contracts.jobs import ExportJob, FailReason, JobKind, JobState, TrainJob
from tevatron.core.formats.files import sha256_tree
from tevatron.core.process import end_processes, parent_pid, processes_with_marker
from tevatron.core.settings import Settings
from tevatron.core.store.models import Job
from tevatron.core.store.outbox import reap
from tevatron.core.store.registered import ModelRepository
from tevatron.core.store.session import Sessions
from tevatron.trainer.main import make_handlers

pytestmark = pytest.mark.db


@pytest.fixture
def bench(
    settings: Settings,
    sessions: Sessions,
    checkpoint_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Bench]:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    found = Bench(settings, sessions, checkpoint_folder, monkeypatch)
    found.behave()
    yield found
    for job_id in found.job_ids:
        assert processes_with_marker(f"{job_id}:") == []
        end_processes(f"{job_id}:", 0)


def test_a_train_job_publishes_one_checkpoint(bench: Bench, contract: CheckpointContract) -> None:
    job_id = bench.train(num_processes=2)
    assert bench.work()
    job = bench.job(job_id)
    checkpoint_id = f"ckpt_{job_id.removeprefix('job_')}"
    assert (job.state, job.message) == (JobState.SUCCEEDED, None)
    assert job.result == {"checkpoint_id": checkpoint_id, "step": 4, "saved_steps": [2, 4]}
    [row] = bench.checkpoints()
    assert (row.id, row.name, row.job_id) == (checkpoint_id, "first", job_id)
    assert row.path == f"checkpoints/{checkpoint_id}"
    assert row.size_bytes > 1000
    assert CheckpointContract.model_validate(row.contract) == contract
    assert (bench.settings.data / row.path / "model.safetensors").read_bytes() == b"weights"
    assert bench.published() == [checkpoint_id]
    assert bench.steps(job_id, 1) == [1, 2, 3, 4]
    assert bench.phases(job_id)[:3] == ["preparing", "loading", "training"]
    assert bench.phases(job_id)[-2:] == ["exporting", "publishing"]
    progress = bench.events(job_id, "progress")[-1]
    assert (progress["done"], progress["total"], progress["unit"]) == (4, 4, "steps")


def test_the_program_gets_its_configuration(bench: Bench) -> None:
    job_id = bench.train()
    assert bench.work()
    config = json.loads((bench.run(job_id) / "config.json").read_text())
    arguments = config.pop("arguments")
    assert config == {
        "backend": "hf",
        "hf_arguments": {},
        "model_name_or_path": str(bench.settings.data / "models" / "tiny"),
        "dataset_path": str(bench.settings.data / "train.jsonl"),
        "dataset_name": "train",
        "validation_path": None,
        "num_processes": 1,
        "output_dir": str(bench.run(job_id)),
        "base_model": "tiny",
        "resume": True,
    }
    assert arguments["train_group_size"] == 8
    assert "stand-in rank 0 of 1 runs" in (bench.run(job_id) / "attempt-1.log").read_text()


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.full), 2])
def test_a_killed_rank_is_another_attempt_from_the_last_saved_state(
    bench: Bench, num_processes: int
) -> None:
    bench.behave(
        steps=9, save_steps=2, step_s=0.1, at_step={"6": "kill"}, ranks=[num_processes - 1]
    )
    job_id = bench.train(num_processes=num_processes)
    assert bench.work()
    job = bench.job(job_id)
    assert (job.state, job.lost_attempts) == (JobState.QUEUED, 1)
    assert bench.work()
    assert (bench.job(job_id).state, bench.job(job_id).attempt) == (JobState.SUCCEEDED, 2)
    saved = bench.saved(job_id, 1)[-1]
    assert saved >= 4
    assert bench.steps(job_id, 2) == list(range(saved + 1, 10))
    assert len(bench.published()) == len(bench.checkpoints()) == 1


def test_a_killed_torchrun_is_another_attempt(bench: Bench) -> None:
    bench.behave(steps=30, save_steps=2, step_s=0.1)
    job_id = bench.train(num_processes=2)
    with bench.working():
        bench.wait_for_step(job_id, 4)
        marked = processes_with_marker(f"{job_id}:1")
        [torchrun] = [pid for pid in marked if parent_pid(pid) not in marked]

        os.kill(torchrun, signal.SIGKILL)
    assert bench.job(job_id).state == JobState.QUEUED
    assert processes_with_marker(f"{job_id}:") == []
    assert bench.work()
    assert bench.job(job_id).state == JobState.SUCCEEDED
    assert bench.steps(job_id, 2)[0] == bench.saved(job_id, 1)[-1] + 1


def test_a_rank_that_is_always_killed_ends_the_job_with_the_end_of_its_log(bench: Bench) -> None:
    bench.behave(at_step={"2": "kill_always"})
    job_id = bench.train()
    for _ in range(3):
        assert bench.work()
    assert not bench.work()
    job = bench.job(job_id)
    assert (job.state, job.reason, job.attempt) == (JobState.FAILED, FailReason.WORKER_LOST, 3)
    assert job.message is not None
    assert "3 attempts are lost, the limit is 3" in job.message
    assert "rank 0 was killed by SIGKILL" in job.message
    assert "stand-in rank 0 of 1 runs" in job.message


def test_a_failure_keeps_its_reason_and_is_not_tried_again(bench: Bench) -> None:
    bench.behave(at_step={"2": "fail:out_of_memory"})
    job_id = bench.train(num_processes=2)
    assert bench.work()
    job = bench.job(job_id)
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "out_of_memory", "training")
    assert job.message == "told to fail with out_of_memory"
    assert not bench.work()
    assert bench.published() == []


def test_a_failure_without_a_word_shows_the_end_of_the_log(bench: Bench) -> None:
    bench.behave(at_step={"2": "raise"}, no_word=True)
    job_id = bench.train()
    assert bench.work()
    job = bench.job(job_id)
    assert (job.state, job.reason) == (JobState.FAILED, FailReason.PROGRAM_FAILED)
    assert "without a word: rank 0 ended with status 1" in str(job.message)
    assert "RuntimeError: the stand-in was told to raise" in str(job.message)
    assert "torch/distributed" not in str(job.message)


@pytest.mark.parametrize("when", ["training", "saving"])
def test_cancel_leaves_no_process_and_nothing_half_done(bench: Bench, when: str) -> None:
    deaf = when == "saving"
    bench.behave(steps=1000, step_s=0.05, save_steps=1000, deaf=deaf)
    job_id = bench.train(num_processes=2)
    with bench.working():
        bench.wait_for_step(job_id, 2)
        if deaf:
            (bench.run(job_id) / "states" / "step-9.tmp").mkdir(parents=True)
        bench.cancel(job_id)
    job = bench.job(job_id)
    assert (job.state, job.reason) == (JobState.CANCELLED, None)
    assert processes_with_marker(f"{job_id}:") == []
    assert bench.published() == []
    assert not list(bench.run(job_id).glob("states/*"))
    assert not bench.work()


def test_cancel_while_it_starts(bench: Bench) -> None:
    job_id = bench.train(num_processes=2)
    with bench.working():
        wait_for(lambda: processes_with_marker(f"{job_id}:"), what="torchrun")
        bench.cancel(job_id)
    assert bench.job(job_id).state == JobState.CANCELLED
    assert bench.checkpoints() == []


def test_cancel_while_it_exports(bench: Bench) -> None:
    bench.behave(at_export="hang")
    job_id = bench.train()
    with bench.working():
        wait_for(lambda: (bench.run(job_id) / "export.tmp").exists(), what="the export")
        bench.cancel(job_id)
    assert bench.job(job_id).state == JobState.CANCELLED
    assert not list(bench.run(job_id).glob("export*"))
    assert bench.published() == []


def test_a_cancel_at_the_last_moment_publishes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the handler's last look and the transaction that ends the job."""
    from tevatron.trainer import publish

    hashed = publish.sha256_tree
    job_id = bench.train()

    def cancel_and_hash(folder: Path) -> str:
        bench.cancel(job_id)
        return hashed(folder)

    monkeypatch.setattr(publish, "sha256_tree", cancel_and_hash)
    assert bench.work()
    assert bench.job(job_id).state == JobState.CANCELLED
    assert bench.published() == []
    assert bench.checkpoints() == []


def test_shutdown_saves_the_state_and_the_next_attempt_goes_on_from_it(bench: Bench) -> None:
    bench.behave(steps=40, save_steps=1000, step_s=0.05)
    job_id = bench.train(num_processes=2)
    with bench.working():
        bench.wait_for_step(job_id, 3)
        bench.shutdown = True
    job = bench.job(job_id)
    assert (job.state, job.lost_attempts) == (JobState.QUEUED, 0)
    [state] = bench.run(job_id).glob("states/*")
    step = int(state.name.removeprefix("step-"))
    bench.shutdown = False
    assert bench.work()
    assert bench.job(job_id).state == JobState.SUCCEEDED
    assert bench.steps(job_id, 1) + bench.steps(job_id, 2) == list(range(1, 41))
    assert bench.steps(job_id, 2)[0] == step + 1


def test_a_lost_lease_ends_the_ranks_and_writes_nothing_more(bench: Bench) -> None:
    bench.behave(steps=1000, save_steps=1000, step_s=0.05)
    job_id = bench.train()
    with bench.working():
        bench.wait_for_step(job_id, 2)
        with bench.sessions.begin() as session:
            # As if nothing had been heard of the worker: the reaper takes the job back.
            session.get_one(Job, job_id).lease_until = None
            job = session.get_one(Job, job_id)
            job.fence += 1
        wait_for(lambda: processes_with_marker(f"{job_id}:") == [], what="the end of the ranks")
    assert bench.job(job_id).state == JobState.RUNNING
    assert bench.published() == []
    with bench.sessions.begin() as session:
        assert reap(session, grace_s=0, max_attempts=3).requeued == []


def test_an_export_that_was_never_published_is_not_trained_again(bench: Bench) -> None:
    bench.behave(steps=6, after_export="kill_always")
    job_id = bench.train()
    assert bench.work()
    assert bench.job(job_id).state == JobState.QUEUED
    assert bench.work()
    assert bench.job(job_id).state == JobState.SUCCEEDED
    assert bench.steps(job_id, 2) == []
    assert bench.phases(job_id)[-1] == "publishing"
    assert not (bench.run(job_id) / "attempt-2.log").exists()


def test_a_checkpoint_whose_row_was_never_stored_is_taken(
    bench: Bench, checkpoint_folder: Path
) -> None:
    job_id = bench.train()
    published = bench.settings.data / "checkpoints" / f"ckpt_{job_id.removeprefix('job_')}"
    published.parent.mkdir()
    checkpoint_folder.rename(published)
    assert bench.work()
    assert bench.job(job_id).state == JobState.SUCCEEDED
    assert len(bench.checkpoints()) == 1
    assert bench.steps(job_id, 1) == []


def test_a_broken_export_fails_the_job(bench: Bench) -> None:
    (bench.checkpoint / "reranker.json").unlink()
    job_id = bench.train()
    assert bench.work()
    job = bench.job(job_id)
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "internal_error", "publishing")
    assert "expected a whole checkpoint, with reranker.json" in str(job.message)
    assert bench.published() == []


def test_mistakes_are_found_before_a_rank_starts(bench: Bench) -> None:
    (bench.settings.data / "train.jsonl").write_text("{}\n")
    job_id = bench.train()
    assert bench.work()
    job = bench.job(job_id)
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "data_error", "preparing")
    assert "train.jsonl:1: field 'query'" in str(job.message)
    assert not bench.run(job_id).exists()


def test_a_model_without_a_tokenizer_is_found_before_a_rank_starts(bench: Bench) -> None:
    (bench.settings.data / "models" / "tiny" / "tokenizer.json").unlink()
    job_id = bench.train()
    assert bench.work()
    job = bench.job(job_id)
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "model_error", "preparing")
    assert "has no tokenizer" in str(job.message)


def test_a_model_of_the_hub_is_fetched_before_a_rank_starts(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = Hub()
    ask_at(hub.url, monkeypatch, tmp_path / "cache")
    hub.add("models", "owner/tiny", bench.settings.data / "models" / "tiny", tag="v1")
    with bench.sessions.begin() as session:
        ModelRepository(session).create(
            "fetched", key_id=None, hub_id="owner/tiny", hub_revision="v1"
        )
    job_id = bench.submit(TrainJob(model="fetched", dataset="train"))
    assert bench.work()
    hub.close()
    assert bench.job(job_id).state == JobState.SUCCEEDED, bench.job(job_id).message
    config = json.loads((bench.run(job_id) / "config.json").read_text())
    assert config["model_name_or_path"].startswith(str(tmp_path / "cache"))
    assert config["base_model"] == "owner/tiny"


def test_more_ranks_than_devices_are_refused(bench: Bench) -> None:
    bench.settings = bench.settings.model_copy(update={"devices": "0"})
    job_id = bench.train(num_processes=2)
    assert bench.work()
    job = bench.job(job_id)
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "config_error", "preparing")
    assert str(job.message).startswith("num_processes: expected at most 1")


def test_an_export_job_publishes_another_checkpoint_from_a_saved_state(bench: Bench) -> None:
    train_id = bench.train()
    assert bench.work()
    export_id = bench.submit(ExportJob(train=train_id, step=2, dtype="bfloat16"))
    assert bench.work()
    assert bench.job(export_id).state == JobState.SUCCEEDED
    config = json.loads((bench.run(export_id) / "config.json").read_text())
    assert config == {
        "run_dir": str(bench.run(train_id)),
        "output_dir": str(bench.run(export_id)),
        "step": 2,
        "dtype": "bfloat16",
        "form": "merged",
    }
    assert len(bench.published()) == len(bench.checkpoints()) == 2


def test_an_export_job_copies_its_checkpoint_to_a_url(bench: Bench, tmp_path: Path) -> None:
    train_id = bench.train()
    assert bench.work()
    place = tmp_path / "bucket" / "first"
    export_id = bench.submit(ExportJob(train=train_id, to=f"file://{place}"))
    assert bench.work()
    job = bench.job(export_id)
    assert (job.state, job.message) == (JobState.SUCCEEDED, None)
    assert job.result is not None
    assert job.result["url"] == f"file://{place}"
    published = bench.settings.data / "checkpoints" / str(job.result["checkpoint_id"])
    assert sha256_tree(place) == sha256_tree(published)


@pushes
def test_an_export_job_pushes_its_checkpoint_to_the_hub(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train_id = bench.train()
    assert bench.work()
    hub = Hub()
    ask_at(hub.url, monkeypatch, tmp_path / "cache")
    hub.writer = "hf_worker"
    before = bench.published()
    refused = bench.submit(ExportJob(train=train_id, to="hf://acme/reranker"))
    assert bench.work()
    job = bench.job(refused)
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "config_error", "publishing")
    assert "model 'acme/reranker' cannot be pushed to the hub" in str(job.message)
    assert bench.published() == before
    monkeypatch.setenv("HF_TOKEN", "hf_worker")
    export_id = bench.submit(ExportJob(train=train_id, to="hf://acme/reranker"))
    assert bench.work()
    hub.close()
    job = bench.job(export_id)
    assert (job.state, job.message) == (JobState.SUCCEEDED, None)
    assert job.result is not None
    assert (job.result["url"], job.result["commit"]) == ("hf://acme/reranker", COMMIT)
    published = bench.settings.data / "checkpoints" / str(job.result["checkpoint_id"])
    pushed = hub.repositories["models", "acme/reranker"]
    assert pushed.private
    assert pushed.files == {
        path.relative_to(published).as_posix(): path.read_bytes()
        for path in published.rglob("*")
        if path.is_file()
    }


def test_an_export_that_cannot_be_copied_fails_and_publishes_nothing(
    bench: Bench, tmp_path: Path
) -> None:
    train_id = bench.train()
    assert bench.work()
    before = bench.published()
    (tmp_path / "file").write_text("")
    export_id = bench.submit(ExportJob(train=train_id, to=f"file://{tmp_path}/file/below"))
    assert bench.work()
    job = bench.job(export_id)
    assert (job.state, job.reason, job.phase) == (
        JobState.FAILED,
        FailReason.CONFIG_ERROR,
        "publishing",
    )
    assert "cannot be written" in str(job.message)
    assert bench.published() == before


def test_an_export_of_a_step_that_was_not_saved_lists_those_that_were(bench: Bench) -> None:
    train_id = bench.train()
    # Once the training is over, the submission itself is refused.
    export_id = bench.submit(ExportJob(train=train_id, step=3))
    assert bench.work()
    assert bench.work()
    job = bench.job(export_id)
    assert (job.state, job.reason, job.phase) == (JobState.FAILED, "config_error", "preparing")
    assert job.message == f"step: train job '{train_id}' has the saved steps 2, 4, got 3"


def test_the_worker_has_a_handler_for_each_of_its_kinds(settings: Settings) -> None:
    assert set(make_handlers(settings)) == {JobKind.TRAIN, JobKind.EXPORT}
