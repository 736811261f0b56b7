"""Two gloo ranks under torchrun: the losses of one rank, a stop that all agree on, one report of a failure."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.trainer.program.training import (
    evaluations,
    losses,
    make_run,
    of_type,
    read_events,
    run_training,
    write_dataset,
)
from torch.nn.parallel import DistributedDataParallel

from tevatron.trainer.program.train import write_config

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 240


def start(run):
    write_config(run)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", "2", "-m", "tevatron.reranker.driver.train", str(run.output_dir / "config.json"),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, output


def ranks_of(process):
    """Return the pids of torchrun's ranks by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in children]


def wait_for_step(run, step):
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if (run.output_dir / "events.jsonl").exists():
            done = [data["step"] for data in of_type(read_events(run.output_dir), "metrics")]
            if done and done[-1] >= step:
                return
        time.sleep(0.05)
    raise TimeoutError(f"step {step} was not reached")


@pytest.mark.timeout(600)
def test_two_ranks_learn_as_one_also_across_a_stop(llama, dataset, tmp_path):
    options = {"num_train_epochs": 6, "save_steps": 1000, "packing_max_tokens": 300}
    one = run_training(make_run(llama, dataset, tmp_path / "one", **options))
    # Two queries a rank: the last step of an epoch has one query, so that rank 1 has none.
    run = make_run(
        llama,
        dataset,
        tmp_path / "two",
        **options,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
    )
    process = start(run)
    wait_for_step(run, 2)
    # The signal reaches one rank alone; the other learns of it from that one.
    os.kill(ranks_of(process)[-1], signal.SIGTERM)
    status, output = finish(process)
    assert status == 0, output
    (stopped,) = of_type(read_events(run.output_dir), "stopped")
    assert stopped["step"] >= 2
    assert of_type(read_events(run.output_dir), "exported") == []
    status, output = finish(start(run))
    assert status == 0, output
    events = read_events(run.output_dir)
    assert [data["step"] for data in of_type(events, "metrics")] == list(range(1, 25))
    # fp32 sums in another order drift apart as the steps go by.
    assert losses(events)[:8] == pytest.approx(losses(one)[:8], abs=1e-5)
    assert losses(events) == pytest.approx(losses(one), abs=2e-3)
    assert of_type(events, "exported") == [{"step": 24}]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_two_ranks_measure_held_out_rows_as_one_and_end_at_the_same_step(llama, dataset, tmp_path):
    # Three rows: one rank has two of them, with a pass more. Nothing is learnt, so that the second is no better.
    held_out = write_dataset(tmp_path / "held.jsonl", 3)
    options = {
        "validation": held_out,
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "early_stopping_patience": 2,
        "learning_rate": 1e-12,
        "packing_max_tokens": 100,
    }
    one = evaluations(run_training(make_run(llama, dataset, tmp_path / "one", **options)))
    run = make_run(
        llama, dataset, tmp_path / "two", **{**options, "per_device_train_batch_size": 2}
    )
    status, output = finish(start(run))
    assert status == 0, output
    events = read_events(run.output_dir)
    two = evaluations(events)
    assert [data["step"] for data in two] == [data["step"] for data in one] == [1, 2, 3]
    for name in ("eval_loss", "eval_ndcg@10"):
        assert [data[name] for data in two] == pytest.approx([data[name] for data in one], abs=1e-5)
    assert of_type(events, "exported") == [{"step": 1}]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_failure_is_reported_and_ends_all_ranks(llama, tmp_path):
    dataset = tmp_path / "train.jsonl"
    dataset.write_text('{"query": "who", "positive_passages": []}\n')
    run = make_run(llama, dataset, tmp_path / "run")
    status, output = finish(start(run))
    assert status != 0, output
    failed = of_type(read_events(run.output_dir), "failed")[0]
    assert failed["reason"] == "data_error"
    assert failed["phase"] == "preparing"
    assert "train.jsonl:1" in failed["message"]


def test_one_rank_under_torchrun_keeps_no_second_copy_of_its_gradients(
    llama, dataset, tmp_path, monkeypatch
):
    wrapped = []
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda *_, **__: wrapped.append(True))
    for name, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    run_training(make_run(llama, dataset, tmp_path, max_steps=1))
    assert wrapped == []
