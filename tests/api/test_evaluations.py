from __future__ import annotations

import httpx
import pytest
from tests.support.resources import make_resources


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
