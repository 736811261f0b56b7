"""The worker as a process: killed in the middle of scoring, its job ends by another one, once, and scores no pair twice."""

import json
import os
import signal
import threading

import pytest
from sqlalchemy import select
from tests.support.processes import python, running, wait_for

from tevatron.core.contracts.jobs import EvalJob, JobKind, JobState, RankList, Rerank
from tevatron.core.store.evaluations import EvaluationRepository
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.models import DatasetKind, Evaluation, Job
from tevatron.core.store.outbox import reap
from tevatron.core.store.registered import DatasetRepository
from tevatron.core.store.scorers import ScorerRepository
from tevatron.core.worker.celery_app import make_celery, publish

pytestmark = pytest.mark.db

NUM_PASSAGES = 60


@pytest.fixture
def settings(settings):
    """A lease that a busy machine does not break."""
    return settings.model_copy(update={"lease_s": 8.0})


@pytest.fixture
def job_id(settings, sessions, start_scorer):
    """An eval job that reranks 60 candidates of one query with a scorer that is there."""
    folder = settings.data / "datasets" / "set"
    (folder / "qrels").mkdir(parents=True)
    lines = [
        json.dumps({"_id": f"d{i}", "text": f"passage {i} of tea"}) for i in range(NUM_PASSAGES)
    ]
    (folder / "corpus.jsonl").write_text("\n".join(lines))
    (folder / "queries.jsonl").write_text('{"_id": "q", "text": "passage 7"}')
    (folder / "qrels" / "test.tsv").write_text("q\td7\t1\n")
    run = settings.data / "datasets" / "run.txt"
    run.write_text("".join(f"q d{i} {-i}\n" for i in range(NUM_PASSAGES)))
    with sessions.begin() as session:
        for name, kind, path in (
            ("set", DatasetKind.BEIR, folder),
            ("run", DatasetKind.RANKLIST, run),
        ):
            relative = str(path.relative_to(settings.data))
            DatasetRepository(session).create(name, key_id=None, kind=kind, stats={}, path=relative)
    with sessions.begin() as session:
        scorer = start_scorer(token="t")
        start_scorer.scorer = scorer
        ScorerRepository(session).register_external(
            scorer.url, key_id=None, name="there", token="t", engine="hf"
        )
    spec = EvalJob(
        dataset="set",
        first_stage=RankList(dataset="run"),
        rerank=Rerank(scorers=["there"]),
        metrics=["mrr@10"],
    )
    with sessions.begin() as session:
        return JobRepository(session).submit({"": spec}, key_id=None)[0].id


@pytest.fixture
def job(sessions, job_id):
    def look():
        with sessions.begin() as session:
            return session.get_one(Job, job_id)

    return look


@pytest.fixture
def scorer(start_scorer, job_id):
    """The job's scorer; it takes the first two requests, and hangs on the third until `go_on` is set."""
    scorer = start_scorer.scorer
    scorer.go_on = threading.Event()
    scorer.before_answer = lambda pairs: len(scorer.requests) < 3 or scorer.go_on.wait(60)
    yield scorer
    scorer.go_on.set()


def worker(environment):
    return running(python("-P", "-m", "tevatron.evaluator.main", "worker"), environment=environment)


def wake(settings, job_id):
    publish(make_celery(settings, producer=True), JobKind.EVAL, job_id=job_id)


def test_killed_worker_loses_no_score_and_its_job_ends_once(
    settings, sessions, environment, job_id, job, scorer
):
    with worker(environment) as process:
        wake(settings, job_id)
        wait_for(lambda: len(scorer.requests) >= 3, timeout_s=60, what="the third request")
        os.kill(process.pid, signal.SIGKILL)
    scorer.go_on.set()
    log = settings.data / "runs" / job_id / "scores.jsonl"
    kept = sum(len(json.loads(line)["scores"]) for line in log.read_text().splitlines())
    assert kept > 0
    asked = scorer.num_pairs

    def requeued():
        with sessions.begin() as session:
            return reap(session, grace_s=0.1, max_attempts=3).requeued

    wait_for(requeued, timeout_s=30, what="the end of the lease")
    with worker(environment):
        wake(settings, job_id)
        wait_for(lambda: job().state is JobState.SUCCEEDED, timeout_s=60, what="the second attempt")
    assert job().attempt == 2
    assert scorer.num_pairs - asked == NUM_PASSAGES - kept
    assert job().result["metrics"] == {"mrr@10": 1.0}
    with sessions.begin() as session:
        assert len(session.scalars(select(Evaluation)).all()) == 1
        evaluation = EvaluationRepository(session).of_job(job_id)
        assert [tuple(v) for v in EvaluationRepository(session).values(evaluation.id)] == [
            ("mrr@10", "q", 1.0)
        ]


def test_worker_that_is_told_to_stop_gives_its_job_back(settings, environment, job_id, job, scorer):
    with worker(environment) as process:
        wake(settings, job_id)
        wait_for(lambda: len(scorer.requests) >= 3, timeout_s=60, what="the third request")
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
    assert job().state is JobState.QUEUED


def test_cancelled_job_is_over_within_seconds_and_the_worker_goes_on(
    settings, sessions, environment, job_id, job, scorer
):
    with worker(environment) as process:
        wake(settings, job_id)
        wait_for(lambda: len(scorer.requests) >= 3, timeout_s=60, what="the third request")
        with sessions.begin() as session:
            JobRepository(session).request_cancel(job_id, key_id=None)
        wait_for(lambda: job().state is JobState.CANCELLED, timeout_s=10, what="the cancelled job")
        assert process.poll() is None
