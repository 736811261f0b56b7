"""`tevatron run` of a study against the real API; the workers' part is played by the store's own functions."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from tests.support.store import publish_checkpoint
from typer.testing import CliRunner

from tevatron.core.cli import study_run
from tevatron.core.cli.main import app as command
from tevatron.core.contracts.jobs import FailReason, JobKind
from tevatron.core.store.claims import claim_next_job, fail, succeed
from tevatron.core.store.outbox import settle_waiting
from tevatron.core.store.session import Sessions

FILE = """\
name: sizes
models: {{tiny: "{model}"}}
datasets:
  rows: {{kind: training, path: "{rows}"}}
  beir: {{kind: beir, path: "{beir}"}}
matrix:
  lr: ["1e-4", "1e-5"]
  depth: [5, 10]
jobs:
  fit-${{{{ matrix.lr }}}}:
    kind: train
    model: tiny
    dataset: rows
    arguments:
      learning_rate: ${{{{ matrix.lr }}}}
  test-${{{{ matrix.lr }}}}-${{{{ matrix.depth }}}}:
    kind: eval
    dataset: beir
    rerank:
      checkpoint:
        from: fit-${{{{ matrix.lr }}}}
      depth: ${{{{ matrix.depth }}}}
"""


@pytest.fixture
def file(tmp_path: Path, training_file: Path, model_folder: Path, beir_folder: Path) -> Path:
    path = tmp_path / "study.yaml"
    path.write_text(FILE.format(model=model_folder, rows=training_file, beir=beir_folder))
    return path


@pytest.fixture
def run(server_url: str, file: Path):
    def run(*words: str):
        environment = {"TEVATRON_URL": server_url, "NO_COLOR": "1"}
        return CliRunner().invoke(command, ["run", str(file), *words], env=environment)

    return run


def jobs_of(client: httpx.Client) -> dict[str, dict]:
    rows = client.get("/v1/jobs").json()["data"]
    assert len({row["name"] for row in rows}) == len(rows), "one name twice"
    return {row["name"]: row for row in rows}


def train(sessions: Sessions, *, reason: FailReason | None = None) -> None:
    """Bring the next training to its end."""
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
        assert claim is not None
        if reason is not None:
            fail(session, claim, reason=reason, message="line 17")
        else:
            succeed(session, claim, {})
            publish_checkpoint(session, claim.job_id)
    with sessions.begin() as session:
        settle_waiting(session)


def evaluate(sessions: Sessions, value: float) -> None:
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.EVAL], worker="w", lease_s=60.0)
        assert claim is not None
        succeed(session, claim, {"metrics": {"ndcg@10": value}})


def test_the_same_file_again_submits_nothing_twice(run, client, file):
    first = run("--no-follow", "--json")
    assert first.exit_code == 0, first.output
    before = jobs_of(client)
    assert list(before) == [
        "test-1e-5-10",
        "test-1e-5-5",
        "test-1e-4-10",
        "test-1e-4-5",
        "fit-1e-5",
        "fit-1e-4",
    ]
    assert before["test-1e-5-10"]["depends_on"] == [before["fit-1e-5"]["id"]]
    assert before["fit-1e-5"]["spec"]["arguments"]["learning_rate"] == 1e-5
    again = run("--no-follow", "--json")
    assert json.loads(again.stdout) == json.loads(first.stdout)
    assert jobs_of(client) == before
    # One more cell is one more job, on the training that is there.
    file.write_text(file.read_text().replace("[5, 10]", "[5, 10, 20]"))
    assert run("--no-follow").exit_code == 0
    after = jobs_of(client)
    assert set(after) - set(before) == {"test-1e-4-20", "test-1e-5-20"}
    assert after["test-1e-5-20"]["depends_on"] == [before["fit-1e-5"]["id"]]


@pytest.mark.parametrize("num_sent", [1, 3, 5])
def test_a_submission_that_broke_off_anywhere_is_completed(run, client, monkeypatch, num_sent):
    class Killed(BaseException):
        pass

    sent = []
    submit = study_run.Client.submit

    def dies(self, spec, **options):
        sent.append(spec)
        found = submit(self, spec, **options)
        if len(sent) == num_sent:
            raise Killed  # the job is stored, the command does not know
        return found

    with monkeypatch.context() as patch:
        patch.setattr(study_run.Client, "submit", dies)
        with pytest.raises(Killed):
            run("--no-follow")
    assert len(jobs_of(client)) == num_sent
    assert run("--no-follow").exit_code == 0
    assert len(jobs_of(client)) == 6


def test_a_failed_cell_leaves_the_others_alone_and_is_tried_again_on_request(run, client, sessions):
    run("--no-follow")
    train(sessions, reason=FailReason.DATA_ERROR)
    train(sessions)
    evaluate(sessions, 0.25)
    evaluate(sessions, 0.5)
    done = run()  # follows, and there is nothing left that could come
    assert done.exit_code == 1
    fit = jobs_of(client)["fit-1e-4"]["id"]
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["sizes:", "3", "of", "6", "jobs", "succeeded,", "3", "failed;", "ndcg@10"],
        ["reranker", "lr", "depth", "beir"],
        ["fit-1e-4", "1e-4", "5", "failed"],
        ["fit-1e-4", "1e-4", "10", "failed"],
        ["fit-1e-5", "1e-5", "5", "0.2500"],
        ["fit-1e-5", "1e-5", "10", "0.5000"],
        f"failed: fit-1e-4 ({fit}): data_error: line 17".split(),
    ]
    assert "to try failed jobs again: tevatron run" in done.stderr
    resumed = run("--resume", "--no-follow")
    assert resumed.exit_code == 0, resumed.output
    states = {name: row["state"] for name, row in jobs_of(client).items()}
    assert states == {
        "fit-1e-4": "queued",
        "test-1e-4-5": "waiting",
        "test-1e-4-10": "waiting",
        "fit-1e-5": "succeeded",
        "test-1e-5-5": "succeeded",
        "test-1e-5-10": "succeeded",
    }
    train(sessions)
    evaluate(sessions, 0.75)
    evaluate(sessions, 1.0)
    done = run("--json")
    assert done.exit_code == 0
    values = [row["values"] for row in json.loads(done.stdout)["rows"]]
    assert values == [{"beir": 0.75}, {"beir": 1.0}, {"beir": 0.25}, {"beir": 0.5}]


def test_an_error_of_the_api_names_the_job_and_a_corrected_file_goes_on(run, client, file):
    text = file.read_text()
    file.write_text(text.replace("dataset: beir", "dataset: bier"))
    refused = run("--no-follow")
    assert refused.exit_code == 1
    assert "study 'sizes', job 'test-1e-4-5': Not Found (404): unknown dataset 'bier'" in str(
        refused.exception
    )
    file.write_text(text)
    assert run("--no-follow").exit_code == 0
    assert len(jobs_of(client)) == 6


def test_ctrl_c_leaves_the_jobs_alone_and_says_how_to_go_on(run, client, file, monkeypatch):
    def interrupted(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tevatron.core.cli.follow.time.sleep", interrupted)
    stopped = run()
    assert stopped.exit_code == 130
    assert "no longer followed, still going on: job_" in stopped.stderr
    assert f"the same command goes on with the study: tevatron run {file}" in stopped.stderr
    assert {row["state"] for row in jobs_of(client).values()} == {"queued", "waiting"}


def test_a_dry_run_asks_nobody(file):
    done = CliRunner().invoke(
        command, ["run", str(file), "--dry-run"], env={"TEVATRON_URL": "http://127.0.0.1:9"}
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("sizes: 4 cells, 6 jobs (2 train, 4 eval)\n")


def test_what_is_for_a_study_is_refused_for_another_file(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("jobs:\n  a: {kind: eval, dataset: d}\n")
    done = CliRunner().invoke(command, ["run", str(file), "--resume"])
    assert "are for a study, and this file has no matrix" in str(done.exception)
