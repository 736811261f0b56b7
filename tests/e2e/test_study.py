"""A study whose command is killed twice on its way, on the whole stack: nothing is done twice."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from tests.e2e.conftest import COMMAND
from tests.support.processes import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

STUDY = """\
name: killed
models:
  tiny: tiny
datasets:
  rows: {kind: training, path: train.jsonl}
  sample: {kind: beir, path: sample}
matrix:
  method: [full, lora]
  depth: [2]
  include:
    - {method: full, use_lora: false}
    - {method: lora, use_lora: true}
jobs:
  fit-${{ matrix.method }}:
    kind: train
    model: tiny
    dataset: rows
    arguments:
      rerank_max_len: 128
      train_group_size: 2
      max_steps: 3
      logging_steps: 1
      use_lora: ${{ matrix.use_lora }}
  test-${{ matrix.method }}-${{ matrix.depth }}:
    kind: eval
    dataset: sample
    rerank:
      checkpoint:
        from: fit-${{ matrix.method }}
      depth: ${{ matrix.depth }}
"""


def kill_when(stack, file: Path, reached, *, what: str) -> None:
    """Start the study and kill -9 its command as soon as `reached`."""
    with (file.parent / "killed.log").open("ab") as log:
        process = subprocess.Popen(
            [*COMMAND, "run", str(file)], env=stack.environment, stdout=log, stderr=log
        )
    wait_for(reached, timeout_s=240, what=what)
    assert process.poll() is None, (file.parent / "killed.log").read_text()
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_study_killed_in_the_middle_and_started_again_does_nothing_twice(
    stack, sample, tiny_model
):
    file = sample.parent / "study.yaml"
    file.write_text(STUDY)
    with stack.up() as client:
        kill_when(stack, file, client.jobs, what="the first job")
        begun = {job.name: job.id for job in client.jobs()}
        kill_when(
            stack,
            file,
            lambda: any(job.kind == "train" and job.result for job in client.jobs()),
            what="the end of a training",
        )
        done = stack.run("run", str(file), timeout_s=500)
        assert done.returncode == 0, done.stderr
        jobs = {job.name: job for job in client.jobs()}
        assert sorted(jobs) == [
            "fit-full",
            "fit-lora",
            "test-full-2",
            "test-lora-2",
        ]
        assert len(client.jobs()) == 4
        assert begun.items() <= {name: job.id for name, job in jobs.items()}.items()
        assert {job.attempt for job in jobs.values()} == {1}
        assert len(client.checkpoints()) == 2
        measured = {entry.name: entry.metrics["ndcg@10"] for entry in client.evaluations()}
        assert len(client.evaluations()) == 2
        assert [line.split() for line in done.stdout.splitlines()] == [
            ["killed:", "4", "of", "4", "jobs", "succeeded;", "ndcg@10"],
            ["reranker", "method", "depth", "sample"],
            *(
                [f"fit-{method}", method, "2", f"{measured[f'test-{method}-2']:.4f}"]
                for method in ("full", "lora")
            ),
        ]

        again = stack.run("run", str(file))
        assert (again.returncode, again.stdout) == (0, done.stdout)
        content = json.loads(stack.run("run", str(file), "--json").stdout)
        assert {job["id"] for job in content["jobs"]} == {job.id for job in jobs.values()}
        assert (len(client.jobs()), len(client.evaluations())) == (4, 2)
    assert stack.stop() == 0
