from __future__ import annotations

import httpx
import pytest
from tests.support.resources import make_resources
from tests.support.store import eval_job

from tevatron.core.store.evaluations import EvaluationRepository, Value
from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.models import Evaluation
from tevatron.evaluator.compare_command import main as compare


@pytest.fixture
def ids(sessions) -> dict[str, str]:
    with sessions.begin() as session:
        return make_resources(session, key_id=None)


def test_an_evaluation_shows_its_means(client: httpx.Client, ids: dict[str, str]):
    found = client.get(f"/v1/evaluations/{ids['evaluation']}").json()
    assert found["metrics"] == {"ndcg@10": 0.5, "recall@10": 0.75}
    assert (found["dataset_id"], found["split"], found["num_queries"]) == (
        ids["dataset"],
        "test",
        2,
    )
    assert client.get("/v1/evaluations").json()["data"] == [found]


@pytest.mark.parametrize(
    ("filters", "matches"),
    [
        ({"dataset_id": "dataset"}, True),
        ({"dataset_id": "job"}, False),
        ({"job_id": "job"}, False),
        ({"checkpoint_id": "checkpoint"}, False),
    ],
)
def test_filters(client: httpx.Client, ids: dict[str, str], filters: dict[str, str], matches: bool):
    params = {name: ids[kind] for name, kind in filters.items()}
    assert len(client.get("/v1/evaluations", params=params).json()["data"]) == int(matches)


def test_values_come_in_pages_by_metric_and_query(client: httpx.Client, ids: dict[str, str]):
    path = f"/v1/evaluations/{ids['evaluation']}/values"
    first = client.get(path, params={"limit": 3}).json()
    assert [(row["metric"], row["query_id"], row["value"]) for row in first["data"]] == [
        ("ndcg@10", "q1", 1.0),
        ("ndcg@10", "q2", 0.0),
        ("recall@10", "q1", 0.5),
    ]
    assert first["has_more"] is True
    last = client.get(path, params={"limit": 3, "after": first["next"]}).json()
    assert [(row["metric"], row["query_id"]) for row in last["data"]] == [("recall@10", "q2")]
    assert (last["has_more"], last["next"]) == (False, None)


def test_values_of_one_metric(client: httpx.Client, ids: dict[str, str]):
    path = f"/v1/evaluations/{ids['evaluation']}/values"
    assert len(client.get(path, params={"metric": "ndcg@10"}).json()["data"]) == 2
    assert client.get(path, params={"metric": "ndcg@5"}).json()["data"] == []
    assert client.get(path, params={"metric": "%"}).status_code == 422


def another(sessions, ids: dict[str, str], name: str, values: dict[str, float], **fields) -> str:
    with sessions.begin() as session:
        [job] = JobRepository(session).submit({name: eval_job(name)}, key_id=None)
        first = EvaluationRepository(session).by_id(ids["evaluation"])
        row = Evaluation(
            **{
                "id": f"eval_{name}",
                "name": name,
                "job_id": job.id,
                "dataset_id": first.dataset_id,
                "split": first.split,
                "first_stage": first.first_stage,
                "metrics": {"ndcg@10": sum(values.values()) / len(values)},
                "num_queries": len(values),
                "variant": first.variant,
                "run_sha256": "5" * 64,
                "qrels_sha256": first.qrels_sha256,
                **fields,
            }
        )
        stored = [Value("ndcg@10", query_id, value) for query_id, value in values.items()]
        EvaluationRepository(session).add(row, stored)
        return row.id


def test_two_evaluations_are_compared_query_by_query(client, sessions, ids):
    other = another(sessions, ids, "other", {"q1": 1.0 - 1e-12, "q2": 0.75})
    found = client.get(f"/v1/evaluations/{other}/comparison", params={"baseline": "table"}).json()
    assert found["evaluation"] == client.get(f"/v1/evaluations/{other}").json()
    assert found["baseline"]["id"] == ids["evaluation"]
    assert found["metrics"] == [
        {
            "metric": "ndcg@10",
            "value": pytest.approx(0.875),
            "baseline": 0.5,
            "delta": pytest.approx(0.375),
            "num_won": 1,
            "num_lost": 0,
            "num_same": 1,
        }
    ]
    back = client.get("/v1/evaluations/table/comparison", params={"baseline": other}).json()
    assert (back["metrics"][0]["num_won"], back["metrics"][0]["num_lost"]) == (0, 1)


def test_stored_evaluations_are_compared_by_the_evaluators_command(
    sessions, ids, server_url, monkeypatch, capsys
):
    other = another(sessions, ids, "other", {"q1": 1.0, "q2": 0.75})
    monkeypatch.setenv("TEVATRON_URL", server_url)
    arguments = [f"first={ids['evaluation']}", f"second={other}", "--first_stage", "first"]
    assert compare(arguments) == 0
    out = capsys.readouterr().out
    assert "| second | **0.8750** (+0.3750) |" in out
    assert f"second against first on {ids['dataset']}, ndcg@10: won 1 (+0.7500 on average)" in out
    of = {"benchmark": {"name": "beir15", "dataset": "scifact"}}
    scifact = another(sessions, ids, "scifact", {"q1": 1.0, "q2": 0.5}, **of)
    assert compare([f"ours={scifact}", "--benchmark", "beir15"]) == 0
    assert "**0.7500**" in capsys.readouterr().out.split("| scifact ")[1].splitlines()[0]
    assert compare(["gone=eval_0", *arguments]) == 2
    assert "evaluation 'eval_0'" in capsys.readouterr().err


def test_evaluations_with_other_judgments_are_not_compared(client, sessions, ids):
    other = another(sessions, ids, "other", {"q1": 1.0}, qrels_sha256="6" * 64)
    answer = client.get(f"/v1/evaluations/{other}/comparison", params={"baseline": "table"})
    assert answer.status_code == 422
    assert "made with other judgments" in answer.json()["detail"]


def test_a_comparison_names_what_it_does_not_know(client, ids):
    assert client.get("/v1/evaluations/table/comparison").status_code == 422
    answer = client.get("/v1/evaluations/table/comparison", params={"baseline": "nothing"})
    assert answer.status_code == 404
    assert "evaluation 'nothing'" in answer.json()["detail"]


# x; null; [1,2]; ["a\u0000","b"]; ["\ud800","b"]; not ASCII
@pytest.mark.parametrize(
    "cursor", ["x", "bnVsbA==", "WzEsMl0=", "WyJhXHUwMDAwIiwiYiJd", "WyJcdWQ4MDAiLCJiIl0=", "\xe9"]
)
def test_a_cursor_that_no_page_gave_is_refused(
    client: httpx.Client, ids: dict[str, str], cursor: str
):
    answer = client.get(f"/v1/evaluations/{ids['evaluation']}/values", params={"after": cursor})
    assert answer.status_code == 422


def test_a_checkpoint_shows_its_contract(client: httpx.Client, ids: dict[str, str]):
    found = client.get("/v1/checkpoints/tune").json()
    assert found["id"] == ids["checkpoint"]
    assert found["job_id"] == ids["job"]
    assert found["contract"] == {"schema_version": 1}
    assert found["path"] == f"checkpoints/{ids['checkpoint']}"
    assert client.get("/v1/checkpoints").json()["data"] == [found]
