"""The training benchmark's command on the CPU: each case in a process of its own, one row each."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ["--backend", "hf", "--model", "qwen3-test", "--gpus", "1", "--queries", "2"]
TINY += ["--group_size", "2", "--micro_batch", "1", "--warmup", "0", "--steps", "1", "--dry"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "train_throughput.py"), *TINY, *words],
        capture_output=True,
        text=True,
        check=False,
    )


def test_both_ways_are_rows():
    done = run("--methods", "ours,reference", "--no_optimizer")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line.rsplit(" (", 1)[0]) for line in done.stdout.splitlines()]
    assert [row["method"] for row in rows] == ["ours", "reference"]
    for row in rows:
        assert row["value"] > 0
        # Both are rounded.
        expected = pytest.approx(4 / row["step_s"], abs=0.06, rel=0.006)
        assert row["value"] == expected or row["step_s"] < 0.1
        assert "without optimizer step" in row["layout"]


def test_a_case_that_cannot_be_says_why_and_is_no_row():
    done = run("--methods", "ours", "--fsdp", "full_shard")
    assert done.returncode == 1
    assert "--fsdp full_shard needs GPUs" in done.stdout
    assert "no figure: qwen3-test, hf, DP=1, FSDP2 full_shard" in done.stdout
