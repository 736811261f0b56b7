"""Eval jobs under a benchmark's rules, and the table of a benchmark out of them."""

import json

import pytest
from tests.support.eval_jobs import CORPUS, QRELS, QUERIES, write_beir

from tevatron.core.contracts.jobs import BenchmarkSet, JobState, RankList
from tevatron.core.contracts.resources import EvaluationResource
from tevatron.core.errors import InputError
from tevatron.core.store.evaluations import EvaluationRepository
from tevatron.core.store.models import DatasetKind
from tevatron.evaluator.benchmarks import BENCHMARKS, Benchmark, Dataset, Unit
from tevatron.evaluator.summary import read_evaluations, summary_table

pytestmark = pytest.mark.db

PRIVATE = Benchmark(
    name="private",
    title="Private",
    datasets=(
        Dataset(name="self", split="dev", num_queries=3, drops_identical=True),
        Dataset(name="graded", relevance_level=2),
        Dataset(name="plain"),
    ),
    units=(Unit("self", ("self",)), Unit("others", ("graded", "plain"))),
    columns=("mrr@10", "ndcg@10"),
)


@pytest.fixture
def settings(settings):
    return settings.model_copy(update={"lease_s": 30.0})


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    monkeypatch.setitem(BENCHMARKS, "private", PRIVATE)


@pytest.fixture
def evaluate(jobs):
    """Evaluate a run on the small set under the rules of one of the private benchmark's data sets."""
    folder = jobs.settings.data / "datasets" / "own"
    corpus = CORPUS | {"q1": ("", "the query itself")}
    write_beir(folder, corpus=corpus, queries=QUERIES, qrels=QRELS)
    (folder / "qrels" / "dev.tsv").write_text((folder / "qrels" / "test.tsv").read_text())
    with jobs.sessions.begin() as session:
        jobs.add_dataset(session, "own", DatasetKind.BEIR, folder)
    jobs.add_run("mine", "q1 q1 9\nq1 d1 5\nq1 d4 4\nq2 d5 2\nq2 d1 1\nq3 d3 1\n")

    def run(dataset, **fields):
        benchmark = None if dataset is None else BenchmarkSet(name="private", dataset=dataset)
        fields = {"dataset": "own", "first_stage": RankList(dataset="mine")} | fields
        return jobs.run(benchmark=benchmark, name="mine", metrics=["mrr@10", "ndcg@10"], **fields)

    return run


def test_documents_that_must_not_count_are_dropped_under_the_benchmarks_split(jobs, evaluate):
    assert evaluate(None).result["metrics"]["mrr@10"] == pytest.approx((0.5 + 1 + 1) / 3)
    job = evaluate("self")
    assert job.state is JobState.SUCCEEDED, job.message
    assert job.result["metrics"]["mrr@10"] == 1.0
    assert "1 documents that must not count for their query are dropped" in jobs.messages(job.id)
    evaluation, _ = jobs.evaluation(job.id)
    assert (evaluation.split, evaluation.benchmark) == (
        "dev",
        {"name": "private", "dataset": "self"},
    )
    assert "q1 Q0 q1" not in (jobs.folder(job.id) / "first_stage.txt").read_text()


def test_relevance_level_is_the_benchmarks(jobs, evaluate):
    job = evaluate("graded")
    # Of the relevant documents only q1's has grade 2.
    assert job.result["metrics"]["mrr@10"] == pytest.approx(0.5 / 3)
    evaluation, _ = jobs.evaluation(job.id)
    assert "relevant is grade 2 or higher" in evaluation.variant


def test_numbers_lie_in_the_run_folder_in_the_references_form(jobs, evaluate):
    job = evaluate("self")
    found = json.loads((jobs.folder(job.id) / "metrics.json").read_text())
    assert (found["dataset"], found["benchmark"], found["split"]) == ("self", "private", "dev")
    assert found["mrr"] == {"MRR@10": 1.0}
    assert found["per_query"]["mrr@10"] == {"q1": 1.0, "q2": 1.0, "q3": 1.0}


def test_other_judgments_than_the_benchmarks_are_refused(jobs, evaluate):
    folder = jobs.settings.data / "datasets" / "own"
    (folder / "qrels" / "dev.tsv").write_text("q1\td1\t1\n")
    job = evaluate("self")
    assert (job.state, job.reason) == (JobState.FAILED, "data_error")
    assert (
        "these are not the judgments of self (dev): expected 3 judged queries, got 1" in job.message
    )


def test_unknown_benchmark_and_data_set_are_told(jobs, evaluate):
    job = evaluate("selv")
    assert (job.state, job.reason) == (JobState.FAILED, "config_error")
    assert "Did you mean 'self'?" in job.message


def resources(jobs):
    with jobs.sessions.begin() as session:
        rows = EvaluationRepository(session).list_evaluations(key_id=None).items
        return [EvaluationResource.model_validate(row) for row in rows]


def test_table_of_the_benchmark_comes_out_of_the_jobs(jobs, evaluate):
    evaluate("plain")
    for name in ("self", "graded", "plain"):
        evaluate(name)
    table = summary_table(
        PRIVATE,
        read_evaluations(PRIVATE, resources(jobs), "mine"),
        title="mine",
        columns=PRIVATE.columns,
    )
    graded, plain = 0.5 / 3, (0.5 + 1 + 1) / 3
    values = {row.label: row.cells[0].value for row in table.rows}
    assert values == pytest.approx(
        {
            "self": 1.0,
            "others": (graded + plain) / 2,
            "average of 2": (1.0 + (graded + plain) / 2) / 2,
        }
    )


def test_missing_and_mixed_jobs_have_no_average(jobs, evaluate, host):
    evaluate("self")
    with pytest.raises(
        InputError, match="the evaluations named 'mine': results of 1 of 3 data sets"
    ):
        read_evaluations(PRIVATE, resources(jobs), "mine")
    evaluate("plain", rerank={"model": "m", "prompt_template": "tevatron"})
    with pytest.raises(InputError, match="the results of self and plain are of different systems"):
        read_evaluations(PRIVATE, resources(jobs), "mine", may_lack=True)
