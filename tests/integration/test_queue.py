"""Many jobs for one worker, and jobs that depend on others."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.live_stack import LiveStack, train_job

from tevatron.core.contracts.jobs import (
    EvalJob,
    EventType,
    From,
    JobGroup,
    JobState,
    RankList,
    Rerank,
)
from tevatron.core.contracts.resources import DatasetKind, DatasetRequest

pytestmark = [pytest.mark.e2e, pytest.mark.db]


def test_fifty_score_only_eval_jobs_at_once_run_exactly_once_each(stack: LiveStack) -> None:
    spec = EvalJob(dataset="small", first_stage=RankList(dataset="first"), metrics=["ndcg@10"])
    jobs = stack.client.submit(JobGroup(jobs={f"eval-{number}": spec for number in range(50)}))
    assert len({job.id for job in jobs}) == 50
    metrics = set()
    for job in jobs:
        done = stack.wait_succeeded(job.id)
        assert done.attempt == 1
        started = [
            data["state"]
            for data in stack.data_of(job.id, EventType.STATE)
            if data["state"] == "starting"
        ]
        assert started == ["starting"]
        [evaluation] = stack.client.evaluations(job_id=job.id)
        metrics.add(evaluation.metrics["ndcg@10"])
        stack.assert_succeeded_once(job.id)
    assert len(metrics) == 1


def test_a_failed_train_fails_the_eval_that_waits_for_it(stack: LiveStack, inputs: Path) -> None:
    path = inputs / "spoilt.jsonl"
    path.write_bytes((inputs / "train.jsonl").read_bytes())
    stack.client.register_dataset(
        DatasetRequest(name="spoilt", kind=DatasetKind.TRAINING, path=str(path))
    )
    lines = path.read_text().splitlines()
    lines[16] = '{"query_id": "q16", "query": "no end'
    path.write_text("\n".join(lines))
    train = train_job().model_copy(update={"dataset": "spoilt"})
    evaluation = EvalJob(dataset="small", rerank=Rerank(checkpoint=From(source="first")))
    train_id, eval_id = (
        job.id for job in stack.client.submit(JobGroup(jobs={"first": train, "second": evaluation}))
    )
    failed = stack.wait_final(train_id)
    assert (failed.state, failed.reason, failed.phase) == (
        JobState.FAILED,
        "data_error",
        "preparing",
    )
    assert "spoilt.jsonl:17: not JSON" in str(failed.message)
    waiting = stack.wait_final(eval_id)
    assert (waiting.state, waiting.reason) == (JobState.FAILED, "dependency_failed")
    assert train_id in str(waiting.message)
    assert stack.client.evaluations(job_id=eval_id) == []
