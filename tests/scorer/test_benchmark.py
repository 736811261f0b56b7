"""benchmarks/score_throughput.py on a tiny shape: every method runs, and the figures are whole."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_the_benchmark_measures_every_method(tmp_path):
    flags = "--models qwen3-tiny --engines hf --dtype float32 --queries 2 --candidates 8 --rounds 1 --dry"
    done = subprocess.run(
        [sys.executable, "benchmarks/score_throughput.py", *flags.split(), "--work_dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    rows = [json.loads(line) for line in done.stdout.decode().splitlines() if line.startswith("{")]
    assert [row["layout"] for row in rows] == [
        "padded, full logits, batches of 64",
        "hf, offline",
        "hf, HTTP",
    ]
    assert [row["method"] for row in rows] == ["reference", "ours", "ours"]
    for row in rows:
        assert row["value"] > 0
        # Mean prompts are 160 tokens long, and a round of 16 is small.
        assert 90 < row["tokens_per_s"] / row["value"] < 260
        assert 0 < row["share_of_peak"] < 1
    assert rows[2]["p99_ms"] >= rows[2]["p50_ms"] > 0
    difference, _, spread = rows[1]["score_difference"].partition(" at a deviation of ")
    assert float(difference) < 1e-3 * float(spread) + 1e-3
