"""The main road through the command: register, train, publish, serve, evaluate, look at the results."""

import json

import pytest

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


def test_one_file_goes_from_a_base_model_to_a_table(stack, sample, tiny_model):
    file = sample.parent / "run.yaml"
    file.write_text(RUN_FILE)
    with stack.up():
        done = stack.run("run", str(file), timeout_s=500)
        assert done.returncode == 0, done.stderr
        # Where standard error is no terminal, progress comes as plain lines.
        assert " fit: training\n" in done.stderr
        assert " reranked: succeeded\n" in done.stderr
        table = done.stdout.splitlines()
        assert any(line.startswith("sample (test, 3 queries)") for line in table)
        assert any(line.split()[:2] == ["BM25", "1.0000"] for line in table)
        assert any(line.split()[0] == "reranked" for line in table if line)

        results = json.loads(stack.run("results", "--json").stdout)
        assert [entry["name"] for entry in results] == ["reranked", "BM25"]
        assert results[0]["checkpoint_id"].startswith("ckpt_")
        assert (
            "metrics"
            in json.loads(stack.run("show", results[0]["job_id"], "--json").stdout)["result"]
        )

        # The same file again registers nothing anew.
        again = stack.run("run", str(file), "--no-follow", "--json")
        assert again.returncode == 0, again.stderr
        assert len(json.loads(again.stdout)) == 3
    assert stack.stop() == 0


def test_cancelled_job_ends_and_one_unknown_job_does_not_spare_the_others(
    stack, sample, tiny_model
):
    with stack.up():
        stack.run("models", "add", "tiny", str(tiny_model))
        stack.run(
            "datasets", "add", "rows", str(sample.parent / "train.jsonl"), "--kind", "training"
        )
        flags = ["--max-steps", "100000", "--rerank-max-len=128", "--train_group_size", "2"]
        words = ["submit", "train", "--model", "tiny", "--dataset", "rows", *flags, "--json"]
        (job,) = json.loads(stack.run(*words).stdout)
        assert job["spec"]["arguments"]["max_steps"] == 100000
        cancelled = stack.run("cancel", job["id"], "--json")
        assert cancelled.returncode == 0, cancelled.stderr
        followed = stack.run("logs", "-f", job["id"])
        assert followed.returncode == 1
        assert followed.stdout.splitlines()[-1].endswith("state: cancelled")
        again = stack.run("cancel", "job_1", job["id"], "--json")
        assert again.returncode == 1
        assert "unknown job 'job_1'" in again.stderr
        assert [entry["state"] for entry in json.loads(again.stdout)] == ["cancelled"]
        resumed = stack.run("resume", job["id"], "--json")
        assert (resumed.returncode, json.loads(resumed.stdout)["state"]) == (0, "queued")
        stack.run("cancel", job["id"])
        followed = stack.run("logs", "-f", job["id"])
        states = [
            line.split("state: ")[1] for line in followed.stdout.splitlines() if "state: " in line
        ]
        assert states.count("cancelled") == 2
    assert stack.stop() == 0


def test_failed_job_gives_its_reason_and_status_1(stack, sample, tiny_model):
    broken = sample.parent / "broken.jsonl"
    lines = (sample.parent / "train.jsonl").read_text().splitlines()
    broken.write_text("\n".join([*lines, '{"query_id": "q4"}']) + "\n")
    with stack.up():
        assert stack.run("models", "add", "tiny", str(tiny_model)).returncode == 0
        added = stack.run("datasets", "add", "rows", str(broken), "--kind", "training")
        # Whoever looks first, the API or the worker, names file, line and field.
        if added.returncode == 0:
            done = stack.run("submit", "train", "--model", "tiny", "--dataset", "rows", "--follow")
            assert done.returncode == 1
            assert "data_error" in done.stdout
            message = done.stdout
        else:
            message = added.stderr
        assert "broken.jsonl:4: field 'query'" in message


def test_mistakes_are_one_message_and_status_1(stack, sample):
    with stack.up():
        unknown = stack.run("submit", "eval", "--dataset", "none")
        assert (unknown.returncode, unknown.stdout) == (1, "")
        assert "unknown dataset 'none'" in unknown.stderr
        nothing = stack.run("results", "--dataset", "none")
        assert nothing.returncode == 1
        assert "unknown dataset 'none'; there is none." in nothing.stderr
        outside = stack.run("datasets", "add", "etc", "/etc", "--kind", "beir")
        assert outside.returncode == 1
        assert "expected a path under" in outside.stderr


def test_keys_close_the_door_that_was_open(stack):
    with stack.up():
        assert stack.run("jobs").returncode == 0
        made = json.loads(stack.run("keys", "create", "me", "--json").stdout)
        refused = stack.run("jobs")
        assert refused.returncode == 1
        assert "(401)" in refused.stderr
        stack.environment["TEVATRON_API_KEY"] = made["secret"]
        assert stack.run("jobs").returncode == 0
        listed = stack.run("keys", "list", "--json").stdout
        assert made["secret"] not in listed
        assert stack.run("keys", "revoke", made["id"]).returncode == 0
        listed = json.loads(stack.run("keys", "list", "--json").stdout)
        assert listed[0]["revoked"] != "-"
