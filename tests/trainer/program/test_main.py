"""The command itself, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.trainer.program.training import of_type, read_events

from tevatron.trainer.program.main import main

ROOT = Path(__file__).parents[3]


def test_a_wrong_flag_is_told_without_importing_torch(capsys):
    code = (
        "import sys; from tevatron.trainer.program.main import main;"
        "status = main(['--deepspeed', 'x.json']); sys.exit(0 if 'torch' not in sys.modules else 9 if status == 2 else 8)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "use --fsdp shard_grad_op" in done.stderr


def test_help_names_every_flag_with_default_and_meaning(capsys):
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert "--dataset_path\n      Training JSONL, plain, gz or zst." in told
    assert "--train_group_size  (default: 8)\n      Passages a query" in told


def test_help_is_of_the_driver_that_was_asked(capsys):
    main(["--help"])
    told = capsys.readouterr().out
    assert told.startswith("usage: python -m tevatron.reranker.driver.train --model_name_or_path")
    assert "tensor_model_parallel_size" not in told
    assert "--fsdp" in told
    driver = "tevatron.megatron.driver.distill_train"
    main(["--help"], driver=driver, backend="megatron", defaults={"loss": "listwise_kl"})
    told = capsys.readouterr().out
    assert told.startswith(f"usage: torchrun -m {driver} --model_name_or_path")
    assert "--tensor_model_parallel_size  (default: 1)\n      Ranks that share" in told
    assert "--loss  (default: listwise_kl)" in told
    assert "--fsdp" not in told


@pytest.mark.parametrize("driver", ["reranker.driver.train", "megatron.driver.distill_train"])
def test_a_drivers_help_names_itself(driver):
    done = subprocess.run(
        [sys.executable, "-m", f"tevatron.{driver}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"-m tevatron.{driver} CONFIG.json" in done.stdout


def test_an_error_is_an_event_and_an_exit_code(llama, tmp_path, capsys):
    status = main(
        [
            "--model_name_or_path",
            str(llama),
            "--dataset_path",
            str(tmp_path / "no.jsonl"),
            "--output_dir",
            str(tmp_path),
        ]
    )
    assert status == 1
    (failed,) = of_type(read_events(tmp_path), "failed")
    assert failed["reason"] == "data_error"
    assert failed["phase"] == "preparing"
    assert "no.jsonl: no such file" in failed["message"]
    # A user's mistake needs no traceback.
    assert "Traceback" not in capsys.readouterr().err


def test_the_command_trains_and_keeps_its_config(llama, dataset, tmp_path):
    words = [
        sys.executable, "-m", "tevatron.reranker.driver.train", "--model_name_or_path", str(llama),
        "--dataset_path", str(dataset), "--output_dir", str(tmp_path), "--train_group_size", "2", "--max_steps", "1",
        "--rerank_max_len", "96", "--logging_steps", "1", "--global_batch_size", "64",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    events = read_events(tmp_path)
    assert of_type(events, "exported") == [{"step": 1}]
    assert "--global_batch_size has no effect" in of_type(events, "log")[0]["message"]
    assert (tmp_path / "config.json").is_file()
    assert "step 1/1: loss" in done.stderr
