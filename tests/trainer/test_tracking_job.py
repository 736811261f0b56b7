"""A real job that reports: W&B's offline file holds what Postgres holds, and no secret is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.megatron_worker import Worker
from tests.trainer.program.test_tracking import wandb_metrics

from tevatron.core.contracts.jobs import JobState

pytestmark = pytest.mark.db


@pytest.mark.timeout(300)
def test_a_job_reports_with_the_secrets_of_its_worker_and_shows_none(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", "canary" * 7)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:canary@127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    job_id = worker.submit(
        backend="hf",
        num_processes=1,
        max_steps=3,
        logging_steps=1,
        report_to=["mlflow"],
        wandb_project="papers",
    )
    worker.work()
    assert worker.job(job_id).state is JobState.SUCCEEDED
    folder = worker.settings.data / "runs" / job_id
    # The bench adds which attempt each is of.
    metrics = [
        {name: value for name, value in data.items() if name != "attempt"}
        for data in worker.events(job_id, "metrics")
    ]
    assert [data["step"] for data in metrics] == [1, 2, 3]
    assert wandb_metrics(folder) == metrics
    told = [str(data["message"]) for data in worker.events(job_id, "log")]
    # The server's address is a secret with a password in it, so it has reached the rank.
    (warning,) = [message for message in told if message.startswith("mlflow")]
    assert "http://***@127.0.0.1:1" in warning
    assert not [message for message in told if "canary" in message]
    holders = [
        path for path in folder.rglob("*") if path.is_file() and b"canary" in path.read_bytes()
    ]
    assert holders == []
