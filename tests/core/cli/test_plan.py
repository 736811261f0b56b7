import json
from pathlib import Path

import pytest
from tests.core.test_model_shape import QWEN3_8B
from typer.testing import CliRunner

from tevatron.core.cli.main import app
from tevatron.core.errors import ConfigError


def plan(tmp_path: Path, *words: str) -> str:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3_8B))
    result = CliRunner().invoke(app, ["plan", str(config), *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_the_layout_asked_for_is_shown_with_its_parts(tmp_path: Path):
    output = plan(
        tmp_path,
        *("--backend", "megatron", "--gpus", "2", "--dtype", "bfloat16"),
        *("--packing_max_tokens", "16384"),
        *("--tensor_model_parallel_size", "2"),
    )
    assert "megatron: 8.19 billion parameters" in output
    assert "TP=2 DP=1" in output
    assert "107.3" in output


def test_the_default_is_the_hf_backend_as_for_a_job(tmp_path: Path):
    words = ("--gpus", "2", "--dtype", "bfloat16", "--gradient_checkpointing")
    output = plan(tmp_path, *words, "--packing_max_tokens", "8192", "--fsdp", "shard_grad_op")
    assert "hf: 8.19 billion parameters" in output
    # DDP does not fit.
    assert [line.split()[0:3] for line in output.splitlines()[2:]] == [
        ["DP=2", "FSDP", "shard_grad_op"],
        ["DP=2", "FSDP", "full_shard"],
    ]


def test_where_nothing_fits_it_says_what_may_help(tmp_path: Path):
    output = plan(tmp_path, "--gpus", "1", "--gpu-gib", "24", "--dtype", "bfloat16")
    assert "no layout fits these GPUs: try --gradient_checkpointing" in output


@pytest.mark.parametrize("size", ["nan", "inf", "0", "-3"])
def test_a_size_that_is_none_is_refused(tmp_path: Path, size: str):
    with pytest.raises(ConfigError, match="memory in GiB is above 0 and finite, got"):
        plan(tmp_path, "--gpu-gib", size)


@pytest.mark.parametrize("flag", ["learning_rate", "num_train_epochs", "weight_decay"])
def test_an_infinite_flag_is_refused_by_name(tmp_path: Path, flag: str):
    with pytest.raises(ConfigError, match=f"{flag}: Input should be a finite number, got 'inf'"):
        plan(tmp_path, f"--{flag}", "inf")


def test_a_jobs_file_and_json(tmp_path: Path):
    file = tmp_path / "job.yaml"
    megatron = "megatron: {tensor_model_parallel_size: 2}"
    file.write_text(f"backend: megatron\narguments: {{dtype: bfloat16, {megatron}}}\n")
    words = ["--gpus", "4", "--file", str(file), "--pipeline_model_parallel_size", "2", "--json"]
    made = json.loads(plan(tmp_path, *words))
    assert made["asked"]["layout"] == "TP=2 PP=2 DP=1"
