"""Training on GPUs: bf16 with the flash kernel on one, FSDP on two."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.support.tiny_model import tiny_folder
from tests.trainer.program.training import (
    losses,
    make_run,
    of_type,
    read_events,
    run_training,
    write_dataset,
)

from tevatron.core.contracts.checkpoint import read_contract
from tevatron.trainer.program.train import write_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "train.jsonl")


@pytest.mark.parametrize("changes", [{}, {"use_lora": True}, {"gradient_checkpointing": True}])
def test_bf16_trains_and_is_published(model, dataset, tmp_path, changes):
    events = run_training(
        make_run(model, dataset, tmp_path, dtype="bfloat16", learning_rate=3e-3, **changes)
    )
    assert losses(events)[-1] < losses(events)[0]
    assert of_type(events, "exported") == [{"step": 8}]
    assert read_contract(tmp_path / "export").dtype == "bfloat16"


def torchrun(run, *, stop_after=None):
    write_config(run)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "-m", "tevatron.reranker.driver.train", str(run.output_dir / "config.json"),
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if stop_after is not None:
        events = run.output_dir / "events.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (
            events.exists() and len(of_type(read_events(run.output_dir), "metrics")) >= stop_after
        ):
            time.sleep(0.02)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in children:
            os.kill(int(pid), signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-6000:]
    return read_events(run.output_dir)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changes",
    [{"fsdp": "full_shard"}, {"fsdp": "shard_grad_op"}, {"fsdp": "full_shard", "use_lora": True}],
)
def test_fsdp_learns_as_one_gpu_also_across_a_stop(model, dataset, tmp_path, changes):
    options = {"num_train_epochs": 8, "packing_max_tokens": 300, "save_steps": 1000}
    plain = {name: value for name, value in changes.items() if name != "fsdp"}
    one = run_training(make_run(model, dataset, tmp_path / "one", **options, **plain))
    run = make_run(
        model, dataset, tmp_path / "two", **options, **changes,
        per_device_train_batch_size=1, gradient_accumulation_steps=2,
    )  # fmt: skip
    events = torchrun(run, stop_after=4)
    assert of_type(events, "stopped")
    events = torchrun(run)
    assert losses(events)[:6] == pytest.approx(losses(one)[:6], abs=1e-4)
    assert losses(events) == pytest.approx(losses(one), abs=2e-2)
    assert of_type(events, "exported") == [{"step": 32}]
