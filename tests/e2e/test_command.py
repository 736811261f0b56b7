"""The main road through the command: register, train, publish, serve, evaluate, look at the results."""

import json

import pytest
from tests.e2e.conftest import stack_in

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

RUN_FILE = """\
models:
  tiny: tiny
datasets:
  rows: {kind: training, path: train.jsonl}
  sample: {kind: beir, path: sample}
jobs:
  bm25: {kind: eval, name: BM25, dataset: sample}
  fit:
    kind: train
    name: fit
    model: tiny
    dataset: rows
    arguments: {rerank_max_len: 128, train_group_size: 2, max_steps: 3, logging_steps: 1}
  reranked:
    kind: eval
    name: reranked
    dataset: sample
    rerank: {checkpoint: {from: fit}, depth: 3}
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A stack for the tests of this file, which name what they register each in its own way."""
    with stack_in(tmp_path_factory.mktemp("stack"), root=tmp_path_factory.getbasetemp()) as stack:
        with stack.up():
            yield stack
        assert stack.stop() == 0


def test_one_file_goes_from_a_base_model_to_a_table(running, sample, tiny_model):
    file = sample.parent / "run.yaml"
    file.write_text(RUN_FILE)
    done = running.run("run", str(file), timeout_s=500)
    assert done.returncode == 0, done.stderr
    # Where standard error is no terminal, progress comes as plain lines.
    assert " fit: training\n" in done.stderr
    assert " reranked: succeeded\n" in done.stderr
    table = done.stdout.splitlines()
    assert any(line.startswith("sample (test, 3 queries)") for line in table)
    assert any(line.split()[:2] == ["BM25", "1.0000"] for line in table)
    assert any(line.split()[0] == "reranked" for line in table if line)

    results = json.loads(running.run("results", "--json").stdout)
    assert [entry["name"] for entry in results] == ["reranked", "BM25"]
    assert results[0]["checkpoint_id"].startswith("ckpt_")
    assert (
        "metrics"
        in json.loads(running.run("show", results[0]["job_id"], "--json").stdout)["result"]
    )

    # The same file again registers nothing anew.
    again = running.run("run", str(file), "--no-follow", "--json")
    assert again.returncode == 0, again.stderr
    assert len(json.loads(again.stdout)) == 3


def test_a_scorer_stands_for_jobs(running):
    """It serves what the test before this one trained."""
    started = running.run("scorers", "start", "fit", "--name", "standing")
    assert started.returncode == 0, started.stderr
    words = ["submit", "eval", "--dataset", "sample", "--scorer", "standing", "--depth", "3"]
    done = running.run(*words, "--name", "by-it", "--follow")
    assert done.returncode == 0, done.stderr
    compared = json.loads(running.run("results", "by-it", "reranked", "--json").stdout)
    assert all(metric["num_same"] == 3 for metric in compared["metrics"])
    assert running.run("scorers", "stop", "standing").returncode == 0
    listed = json.loads(running.run("scorers", "list", "--json").stdout)
    (row,) = [one for one in listed if one["name"] == "standing"]
    assert (row["id"], row["state"] in ("stopping", "stopped")) == (started.stdout.strip(), True)


def test_cancelled_job_ends_and_one_unknown_job_does_not_spare_the_others(
    running, sample, tiny_model
):
    running.run("models", "add", "endless", str(tiny_model))
    running.run("datasets", "add", "few", str(sample.parent / "train.jsonl"), "--kind", "training")
    flags = ["--max-steps", "100000", "--rerank-max-len=128", "--train_group_size", "2"]
    words = ["submit", "train", "--model", "endless", "--dataset", "few", *flags, "--json"]
    (job,) = json.loads(running.run(*words).stdout)
    assert job["spec"]["arguments"]["max_steps"] == 100000
    cancelled = running.run("cancel", job["id"], "--json")
    assert cancelled.returncode == 0, cancelled.stderr
    followed = running.run("logs", "-f", job["id"])
    assert followed.returncode == 1
    assert followed.stdout.splitlines()[-1].endswith("state: cancelled")
    again = running.run("cancel", "job_1", job["id"], "--json")
    assert again.returncode == 1
    assert "unknown job 'job_1'" in again.stderr
    assert [entry["state"] for entry in json.loads(again.stdout)] == ["cancelled"]
    resumed = running.run("resume", job["id"], "--json")
    assert (resumed.returncode, json.loads(resumed.stdout)["state"]) == (0, "queued")
    running.run("cancel", job["id"])
    followed = running.run("logs", "-f", job["id"])
    states = [
        line.split("state: ")[1] for line in followed.stdout.splitlines() if "state: " in line
    ]
    assert states.count("cancelled") == 2


def test_failed_job_gives_its_reason_and_status_1(running, sample, tiny_model):
    broken = sample.parent / "broken.jsonl"
    lines = (sample.parent / "train.jsonl").read_text().splitlines()
    broken.write_text("\n".join([*lines, '{"query_id": "q4"}']) + "\n")
    assert running.run("models", "add", "fine", str(tiny_model)).returncode == 0
    added = running.run("datasets", "add", "broken", str(broken), "--kind", "training")
    # Whoever looks first, the API or the worker, names file, line and field.
    if added.returncode == 0:
        done = running.run("submit", "train", "--model", "fine", "--dataset", "broken", "--follow")
        assert done.returncode == 1
        assert "data_error" in done.stdout
        message = done.stdout
    else:
        message = added.stderr
    assert "broken.jsonl:4: field 'query'" in message


def test_mistakes_are_one_message_and_status_1(running, sample):
    unknown = running.run("submit", "eval", "--dataset", "none")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "unknown dataset 'none'" in unknown.stderr
    nothing = running.run("results", "--dataset", "none")
    assert nothing.returncode == 1
    assert "unknown dataset 'none'; there " in nothing.stderr
    outside = running.run("datasets", "add", "etc", "/etc", "--kind", "beir")
    assert outside.returncode == 1
    assert "expected a path under" in outside.stderr


def test_keys_close_the_door_that_was_open(running, monkeypatch):
    assert running.run("jobs").returncode == 0
    made = json.loads(running.run("keys", "create", "me", "--json").stdout)
    refused = running.run("jobs")
    assert refused.returncode == 1
    assert "(401)" in refused.stderr
    monkeypatch.setitem(running.environment, "TEVATRON_API_KEY", made["secret"])
    assert running.run("jobs").returncode == 0
    listed = running.run("keys", "list", "--json").stdout
    assert made["secret"] not in listed
    assert running.run("keys", "revoke", made["id"]).returncode == 0
    listed = json.loads(running.run("keys", "list", "--json").stdout)
    assert listed[0]["revoked"] != "-"
