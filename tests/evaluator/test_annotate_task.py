"""The annotate job's handler on real Postgres, with fake scorers behind a stand-in for the scorer host."""

import json
import time

import pytest
from sqlalchemy import select
from tests.support.eval_jobs import QUICK

from tevatron.core.contracts.jobs import AnnotateJob, EventType, JobState, ScoredBy
from tevatron.core.formats.training import read_training
from tevatron.core.store.models import Dataset, DatasetKind, Scorer, ScorerState
from tevatron.core.store.registered import DatasetRepository

pytestmark = pytest.mark.db

NUM_ROWS = 12


@pytest.fixture
def settings(settings):
    """A lease that a busy machine does not break."""
    return settings.model_copy(update={"lease_s": 30.0})


@pytest.fixture
def annotation(jobs):
    """Return a job's spec; the dataset `mine` is there."""
    path = jobs.settings.data / "datasets" / "mine.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {
                    "query_id": f"q{n % 10}",
                    "query": f"tea number {n}",
                    "positive_passages": [{"docid": "a", "text": f"tea {n}"}, {"text": "more tea"}],
                    "negative_passages": [{"text": "coffee"}],
                }
            )
            + "\n"
            for n in range(NUM_ROWS)
        )
    )
    with jobs.sessions.begin() as session:
        jobs.add_dataset(session, "mine", DatasetKind.TRAINING, path)

    def make(**fields):
        teacher = ScoredBy(model="m", prompt_template="tevatron")
        return AnnotateJob(**{"name": "taught", "dataset": "mine", "teacher": teacher} | fields)

    return make


def dataset(jobs, dataset_id):
    with jobs.sessions.begin() as session:
        return DatasetRepository(session).by_id(dataset_id)


def test_training_set_is_scored_and_registered(jobs, host, annotation):
    job_id = jobs.submit_spec(annotation())
    assert jobs.work()
    job = jobs.job(job_id)
    assert (job.state, job.message) == (JobState.SUCCEEDED, None)
    assert {k: v for k, v in job.result.items() if k != "dataset_id"} == {
        "rows": NUM_ROWS,
        "positives": 2 * NUM_ROWS,
        "negatives": NUM_ROWS,
    }
    made = dataset(jobs, job.result["dataset_id"])
    assert (made.name, made.kind) == ("taught", DatasetKind.TRAINING)
    assert dataset(jobs, made.stats["annotated_from"]).name == "mine"
    rows = list(read_training(jobs.settings.data / made.path))
    assert len(rows) == NUM_ROWS
    assert all(row.has_teacher_scores for row in rows)
    assert host.served[0].num_pairs == 3 * NUM_ROWS
    assert "2 of 12 rows have the query id of an earlier row" in " / ".join(jobs.messages(job_id))
    phases = [data["phase"] for data in jobs.events(job_id, EventType.PHASE)]
    assert phases == ["preparing", "waiting_for_scorer", "scoring", "publishing"]
    last = jobs.events(job_id, EventType.PROGRESS)[-1]
    assert (last["done"], last["total"], last["unit"]) == (NUM_ROWS, NUM_ROWS, "rows")
    # The file is a dataset now, and no longer the job's.
    assert not (jobs.folder(job_id) / "annotated.jsonl").exists()


def test_second_job_of_the_name_gets_a_name_of_its_own(jobs, host, annotation):
    ids = [jobs.submit_spec(annotation()) for _ in range(2)]
    assert jobs.work()
    assert jobs.work()
    names = [dataset(jobs, jobs.job(job_id).result["dataset_id"]).name for job_id in ids]
    assert names == ["taught", f"taught-{ids[1]}"]


def test_later_attempt_goes_on_at_the_first_row_that_is_missing(jobs, host, annotation):
    def stop_at_the_fifth(pairs):
        if len(host.served[0].requests) == 5:
            jobs.stopping = True
            time.sleep(0.5)

    host.prepare = lambda scorer: setattr(scorer, "before_answer", stop_at_the_fifth)
    job_id = jobs.submit_spec(annotation())
    assert jobs.work(pool=QUICK)
    assert jobs.job(job_id).state is JobState.QUEUED
    part = jobs.folder(job_id) / "annotated.jsonl.part"
    kept = len(part.read_bytes().splitlines())
    assert 0 < kept < NUM_ROWS
    scorer = host.served[0]
    scorer.before_answer = lambda pairs: None
    asked = scorer.num_pairs
    jobs.stopping = False
    assert jobs.work()
    assert jobs.job(job_id).state is JobState.SUCCEEDED
    assert scorer.num_pairs - asked == 3 * (NUM_ROWS - kept)


def test_scorer_that_dies_in_the_middle_is_waited_for(jobs, host, annotation):
    def die_at_the_fifth(pairs):
        if len(host.served[0].requests) == 5 and len(host.served) == 1:
            host.restart_child()

    host.prepare = lambda scorer: setattr(scorer, "before_answer", die_at_the_fifth)
    job_id = jobs.submit_spec(annotation())
    assert jobs.work()
    job = jobs.job(job_id)
    assert job.state is JobState.SUCCEEDED, job.message
    assert len(host.served) == 2


def test_teacher_that_comes_back_as_another_one_begins_again(jobs, host, annotation):
    host.info = {"contract_sha256": "a" * 64}

    def change_at_the_fifth(pairs):
        if len(host.served[0].requests) == 5 and len(host.served) == 1:
            host.info = {"contract_sha256": "b" * 64}
            host.restart_child()

    host.prepare = lambda scorer: setattr(scorer, "before_answer", change_at_the_fifth)
    job_id = jobs.submit_spec(annotation())
    assert jobs.work()
    assert jobs.job(job_id).state is JobState.SUCCEEDED
    assert host.served[1].num_pairs == 3 * NUM_ROWS
    assert "the teacher serves something else than before; beginning again" in jobs.messages(job_id)


def test_job_lets_its_scorer_go_and_leaves_one_dataset(jobs, host, annotation):
    job_id = jobs.submit_spec(annotation())
    assert jobs.work()
    deadline = time.monotonic() + 5
    while True:
        with jobs.sessions.begin() as session:
            row = session.scalars(select(Scorer).where(Scorer.job_id == job_id)).one()
            made = session.scalars(select(Dataset).where(Dataset.name == "taught")).all()
        if row.state is ScorerState.STOPPED:
            break
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert len(made) == 1


def test_limit_and_negatives_are_honoured(jobs, host, annotation):
    job_id = jobs.submit_spec(annotation(limit=3, max_negatives=0))
    assert jobs.work()
    result = jobs.job(job_id).result
    assert (result["rows"], result["positives"], result["negatives"]) == (3, 6, 0)
