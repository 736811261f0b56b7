"""Jobs whose scorer has replicas, on real Postgres with fake scorers behind a stand-in for the scorer host."""

import threading
import time
from dataclasses import replace

import pytest
from sqlalchemy import select
from tests.support.eval_jobs import QUICK

from tevatron.core.contracts.jobs import EventType, JobState, Rerank
from tevatron.core.store.models import Scorer
from tevatron.evaluator.rerank import identity_of

pytestmark = pytest.mark.db

OPTIONS = replace(QUICK, max_chunk=1, look_s=0.02)


@pytest.fixture
def settings(settings):
    """A lease that a busy machine does not break."""
    return settings.model_copy(update={"lease_s": 30.0})


def reranked(**changes):
    return Rerank(model="m", prompt_template="tevatron", **changes)


def run(jobs, **rerank):
    job_id = jobs.submit(rerank=reranked(**rerank))
    assert jobs.work(pool=OPTIONS)
    job = jobs.job(job_id)
    assert job.state is JobState.SUCCEEDED, job.message
    return job


def rows_of(jobs, job):
    with jobs.sessions.begin() as session:
        asked = select(Scorer).where(Scorer.job_id == job.id).order_by(Scorer.replica)
        return session.scalars(asked).all()


def the_run(jobs, job):
    return (jobs.folder(job.id) / "run.txt").read_text()


def test_replicas_share_the_pairs_and_go_with_the_job(jobs, host):
    host.prepare = lambda scorer: setattr(scorer, "before_answer", lambda pairs: time.sleep(0.3))
    alone = run(jobs)
    job = run(jobs, replicas=2)
    first, second = host.served[1:]
    assert first.num_pairs + second.num_pairs == 9
    assert first.num_pairs > 0
    assert second.num_pairs > 0
    assert the_run(jobs, job) == the_run(jobs, alone)
    assert job.result["metrics"] == alone.result["metrics"]
    assert [row.replica for row in rows_of(jobs, job)] == [1, 2]
    assert {row.state.value for row in rows_of(jobs, job)} <= {"stopping", "stopped"}


def test_a_replica_that_dies_in_the_middle_is_not_waited_for(jobs, host):
    alone = run(jobs)

    def prepare(scorer):
        place = len(host.served)

        def before_answer(pairs):
            time.sleep(0.2)
            if place == 2 and len(scorer.requests) == 2:
                threading.Thread(target=scorer.kill).start()
                time.sleep(0.2)

        scorer.before_answer = before_answer

    host.prepare = prepare
    job = run(jobs, replicas=2)
    assert the_run(jobs, job) == the_run(jobs, alone)
    # The second one's last chunk was lost on its way, and asked of the first.
    first, second = host.served[1:]
    assert (len(second.requests), first.num_pairs) == (2, 9 - 1)
    phases = [data["phase"] for data in jobs.events(job.id, EventType.PHASE)]
    assert phases.count("waiting_for_scorer") == 1


def test_the_number_of_replicas_decides_no_score():
    assert identity_of(reranked(replicas=2)) == identity_of(reranked())
    assert identity_of(reranked(dtype="bfloat16")) != identity_of(reranked())
