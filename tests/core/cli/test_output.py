"""How results look, literally."""

from datetime import UTC, datetime

from tevatron.core.cli.output import (
    in_order,
    outcome,
    print_comparison,
    print_evaluations,
    print_jobs,
)
from tevatron.core.contracts.resources import EvaluationComparison, EvaluationResource, JobResource

TIME = datetime(2026, 1, 1, tzinfo=UTC)


def evaluation(**fields) -> EvaluationResource:
    return EvaluationResource.model_validate(
        {
            "id": "eval_1",
            "name": None,
            "job_id": "job_1",
            "dataset_id": "ds_1",
            "split": "test",
            "first_stage": {"kind": "bm25", "depth": 100},
            "rerank": None,
            "checkpoint_id": None,
            "model_id": None,
            "metrics": {"ndcg@10": 0.5, "recall@10": 0.25},
            "num_queries": 30,
            "variant": "v",
            "created_at": TIME,
            **fields,
        }
    )


def job(**fields) -> JobResource:
    return JobResource.model_validate(
        {
            "id": "job_1",
            "kind": "train",
            "name": "fit",
            "state": "succeeded",
            "phase": None,
            "reason": None,
            "message": None,
            "priority": 0,
            "attempt": 1,
            "spec": {},
            "depends_on": [],
            "result": {"checkpoint_id": "ckpt_1"},
            "created_at": TIME,
            "started_at": TIME,
            "finished_at": datetime(2026, 1, 1, 0, 0, 42, tzinfo=UTC),
            **fields,
        }
    )


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


def test_systems_stand_against_metrics_with_deltas_to_the_first_stage(capsys):
    reranked = evaluation(
        first_stage={"kind": "bm25", "depth": 10, "metrics": {"recall@10": 0.25, "ndcg@10": 0.5}},
        rerank={"depth": 10},
        checkpoint_id="ckpt_1",
        metrics={"recall@10": 0.25, "ndcg@10": 0.625},
    )
    # Newest first, as the API lists them.
    print_evaluations([reranked, evaluation()], names={"ds_1": "sample", "ckpt_1": "fit"})
    assert lines(capsys.readouterr().out) == [
        "sample (test, 30 queries)",
        "system      ndcg@10           recall@10",
        "bm25        0.5000            0.2500",
        "bm25 + fit  0.6250 (+0.1250)  0.2500 (+0.0000)",
    ]


def test_chosen_metrics_only_and_a_dash_for_one_that_is_missing(capsys):
    print_evaluations([evaluation(name="first")], names={}, metrics=["ndcg@10", "map@100"])
    assert lines(capsys.readouterr().out) == [
        "ds_1 (test, 30 queries)",
        "system  ndcg@10  map@100",
        "first   0.5000   -",
    ]


def test_the_delta_is_to_the_list_that_was_reranked_not_to_another_evaluation(capsys):
    first = {"kind": "ranklist", "dataset": "r", "metrics": {"ndcg@10": 0.75}}
    reranked = evaluation(first_stage=first, rerank={}, name="x")
    print_evaluations([reranked, evaluation()], names={}, metrics=["ndcg@10"])
    assert lines(capsys.readouterr().out)[-1] == "x       0.5000 (-0.2500)"


def test_two_evaluations_side_by_side(capsys):
    entry = {"metric": "ndcg@10", "value": 0.625, "baseline": 0.5, "delta": 0.125}
    found = EvaluationComparison.model_validate(
        {
            "evaluation": evaluation(name="ours"),
            "baseline": evaluation(),
            "metrics": [
                {**entry, "metric": "recall@10", "num_won": 0, "num_lost": 1, "num_same": 2},
                {**entry, "num_won": 20, "num_lost": 3, "num_same": 7},
            ],
        }
    )
    print_comparison(found, names={"ds_1": "sample"})
    assert lines(capsys.readouterr().out) == [
        "sample (test, 30 queries): ours against bm25",
        "metric     bm25    ours    change   won  lost  same",
        "ndcg@10    0.5000  0.6250  +0.1250  20   3     7",
        "recall@10  0.5000  0.6250  +0.1250  0    1     2",
    ]
    print_comparison(found, names={}, metrics=["recall@10"])
    assert len(lines(capsys.readouterr().out)) == 3


def test_metrics_stand_in_one_order_whatever_postgres_gives():
    given = ["mrr@10", "recall@100", "map@100", "recall@20", "ndcg@10", "ndcg@5", "mrr@10"]
    assert in_order(given) == [
        "ndcg@5", "ndcg@10", "map@100", "mrr@10", "recall@20", "recall@100"
    ]  # fmt: skip


def test_jobs_are_one_line_each(capsys):
    print_jobs([job()])
    assert lines(capsys.readouterr().out) == [
        "job    kind   name  priority  state      attempt  took  result",
        "job_1  train  fit   0         succeeded  1        42 s  ckpt_1",
    ]


def test_failed_job_says_why():
    failed = job(state="failed", reason="data_error", message="line 17 is broken", result=None)
    assert outcome(failed) == "data_error: line 17 is broken"


def test_brackets_in_a_message_are_not_markup(capsys):
    print_jobs([job(state="failed", reason="data_error", message="got [red] x", result=None)])
    assert "got [red] x" in capsys.readouterr().out
