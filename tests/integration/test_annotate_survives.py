"""kill -9 in the middle of an annotate job: it goes on where it was, and a train job of the same request uses its output."""

from __future__ import annotations

import pytest
from tests.integration.live_stack import JOB_S, LiveStack, train_job
from tests.support.processes import wait_for

from tevatron.core.contracts.jobs import AnnotateJob, From, JobGroup, ScoredBy
from tevatron.core.contracts.train import LossName
from tevatron.core.formats.training import read_training

pytestmark = [pytest.mark.e2e, pytest.mark.db]


@pytest.mark.full
def test_killed_while_it_annotates(stack: LiveStack, checkpoint: str) -> None:
    tune = train_job()
    tune.dataset = From(source="teach")
    tune.arguments.loss = LossName.LISTWISE_KL
    teach = AnnotateJob(dataset="train", teacher=ScoredBy(checkpoint=checkpoint), max_negatives=3)
    jobs = stack.client.submit(JobGroup(jobs={"teach": teach, "tune": tune}))
    teach_id, tune_id = (job.id for job in jobs)
    part = stack.data / "runs" / teach_id / "annotated.jsonl.part"
    wait_for(
        lambda: part.exists() and part.read_bytes().count(b"\n") >= 20,
        timeout_s=JOB_S,
        what="the first rows",
    )
    stack.kill("evaluator")
    assert stack.job(tune_id).state == "waiting"
    done = stack.wait_succeeded(teach_id)
    assert done.attempt == 2
    assert done.result is not None
    assert (done.result["rows"], done.result["positives"], done.result["negatives"]) == (
        400,
        400,
        1200,
    )
    [made] = [entry for entry in stack.client.datasets() if entry.id == done.result["dataset_id"]]
    assert (made.name, made.stats["rows"]) == ("teach", 400)
    rows = list(read_training(stack.data / str(made.path)))
    assert [row.query_id for row in rows] == [f"q{number}" for number in range(400)]
    assert all(row.has_teacher_scores for row in rows)
    stack.assert_succeeded_once(teach_id)
    trained = stack.wait_succeeded(tune_id)
    assert trained.result is not None
    assert trained.result["checkpoint_id"]
