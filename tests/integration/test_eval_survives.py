"""kill -9 in the middle of an eval job: it succeeds by itself, once, with the numbers of an undisturbed one."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

import pytest
from pydantic import JsonValue
from tests.integration.live_stack import JOB_S, LiveStack
from tests.support.processes import wait_for

from tevatron.core.contracts.jobs import EvalJob, RankList, Rerank

pytestmark = [pytest.mark.e2e, pytest.mark.db]


def eval_job(checkpoint: str) -> EvalJob:
    return EvalJob(
        dataset="small",
        first_stage=RankList(dataset="first"),
        rerank=Rerank(checkpoint=checkpoint),
        metrics=["ndcg@10", "recall@100", "mrr@10"],
    )


def num_chunks(stack: LiveStack, job_id: str) -> int:
    """Count the chunks whose scores are kept."""
    log = stack.data / "runs" / job_id / "scores.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def assert_evaluated_once(stack: LiveStack, job_id: str) -> Mapping[str, JsonValue]:
    job = stack.job(job_id)
    [evaluation] = stack.client.evaluations(job_id=job_id)
    assert job.result is not None
    assert job.result["metrics"] == evaluation.metrics
    values = stack.client.evaluation_values(evaluation.id)
    assert len(values) == 3 * 40
    stack.assert_succeeded_once(job_id)
    wait_for(lambda: not stack.scorer_children(), timeout_s=30, what="the end of the scorer")
    return evaluation.metrics


@pytest.fixture(scope="module")
def undisturbed(stack: LiveStack, checkpoint: str) -> Mapping[str, JsonValue]:
    job_id = stack.submit(eval_job(checkpoint))
    stack.wait_succeeded(job_id)
    return assert_evaluated_once(stack, job_id)


@pytest.mark.parametrize(
    ("part", "attempts"),
    [
        ("evaluator", 2),
        pytest.param("scorer", 1, marks=pytest.mark.full),
        ("scorer's child", 1),
    ],
)
def test_killed_while_it_scores(
    stack: LiveStack,
    checkpoint: str,
    undisturbed: Mapping[str, JsonValue],
    part: str,
    attempts: int,
) -> None:
    job_id = stack.submit(eval_job(checkpoint))
    wait_for(lambda: num_chunks(stack, job_id) >= 3, timeout_s=JOB_S, what="the first scores")
    if part == "scorer's child":
        [child] = stack.scorer_children()
        os.kill(child, signal.SIGKILL)
    else:
        stack.kill(part)
    assert (stack.job(job_id).state, stack.job(job_id).phase) == ("running", "scoring")
    assert stack.wait_succeeded(job_id).attempt == attempts
    assert assert_evaluated_once(stack, job_id) == undisturbed
