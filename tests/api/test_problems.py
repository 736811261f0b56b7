from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI
from tests.support.asgi import get

from tevatron.api.app import create_app
from tevatron.core.errors import BusyError
from tevatron.core.store.session import make_engine

JOB = {"kind": "train", "model": "m", "dataset": "d"}


def problem(answer: httpx.Response, status: int, code: str) -> dict:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    found = answer.json()
    assert found["status"] == status
    assert found["code"] == code
    assert found["type"] == f"urn:tevatron:problem:{code}"
    assert found["request_id"] == answer.headers["x-request-id"]
    assert found["title"]
    assert found["detail"]
    return found


def test_404_of_an_unknown_path(client: httpx.Client):
    problem(client.get("/nothing/here"), 404, "not_found")


def test_404_of_an_unknown_id(client: httpx.Client):
    found = problem(client.get("/v1/jobs/job_1"), 404, "not_found")
    assert found["detail"] == "unknown job 'job_1'; there is none."


def test_405_names_what_is_allowed(client: httpx.Client):
    answer = client.put("/v1/jobs", json={})
    problem(answer, 405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) >= {"POST"}


def test_422_points_to_each_fault_and_says_what_came(client: httpx.Client):
    arguments = {"train_group_size": 0, "learning_rat": 1.0, "loss": "ranknett", "packing": 1}
    body = {**JOB, "num_processes": "8", "arguments": arguments, "color": "red"}
    del body["dataset"]
    found = problem(client.post("/v1/jobs", json=body), 422, "invalid_input")
    assert {fault["pointer"]: fault["message"] for fault in found["errors"]} == {
        "/dataset": "Field required",
        "/num_processes": 'Input should be a valid integer, got "8"',
        "/arguments/train_group_size": "Input should be greater than or equal to 2, got 0",
        "/arguments/loss": "Input should be 'contrastive', 'listwise_kl', 'margin_mse', 'ranknet' or "
        "'listnet', got \"ranknett\"",
        "/arguments/packing": "Input should be a valid boolean, got 1",
        "/arguments/learning_rat": "Extra inputs are not permitted",
        "/color": "Extra inputs are not permitted",
    }
    assert found["detail"].startswith("/dataset: Field required (and 6 more)")


def test_422_points_into_a_group(client: httpx.Client):
    body = {"jobs": {"a/b": JOB, "c": {"kind": "eval", "dataset": "d", "metrics": ["ndcg@10", 3]}}}
    found = problem(client.post("/v1/jobs", json=body), 422, "invalid_input")
    pointers = [fault["pointer"] for fault in found["errors"]]
    assert pointers == ["/jobs/a~1b", "/jobs/c/metrics/1"]


def test_422_of_a_kind_that_is_not_there(client: httpx.Client):
    found = problem(client.post("/v1/jobs", json={**JOB, "kind": "trian"}), 422, "invalid_input")
    assert "'trian'" in found["detail"]
    assert "'train'" in found["detail"]


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ({"learning_rate": 1, "max_steps": 8}, True),
        ({"max_steps": 8.5}, False),
        ({"max_steps": "8"}, False),
        ({"learning_rate": "1e-5"}, False),
        ({"use_lora": "true"}, False),
        ({"megatron": {"tensor_model_parallel_size": "2"}}, False),
    ],
)
def test_a_number_is_a_number(client: httpx.Client, arguments: dict[str, object], taken: bool):
    answer = client.post("/v1/jobs", json={**JOB, "arguments": arguments})
    # Taken, it is the model that there is not.
    assert answer.status_code == (404 if taken else 422), answer.text


def test_422_escapes_pointers(client: httpx.Client):
    body = {"name": "n", "kind": "training", "a/b~c": 1}
    found = problem(client.post("/v1/datasets", json=body), 422, "invalid_input")
    assert [fault["pointer"] for fault in found["errors"]] == ["/a~1b~0c"]


def test_500_says_nothing_of_the_inside_and_keeps_the_request_id(
    app: FastAPI, client: httpx.Client
):
    @app.get("/v1/broken")
    def broken() -> None:
        raise ZeroDivisionError("a secret of the inside")

    answer = client.get("/v1/broken", headers={"X-Request-ID": "mine-1"})
    found = problem(answer, 500, "internal_error")
    assert found["request_id"] == "mine-1"
    assert "secret" not in answer.text


def test_429_says_when_to_come_back(app: FastAPI, client: httpx.Client):
    @app.get("/v1/busy")
    def busy() -> None:
        raise BusyError("full", retry_after_s=7)

    answer = client.get("/v1/busy")
    problem(answer, 429, "busy")
    assert answer.headers["retry-after"] == "7"


def test_503_when_the_database_does_not_answer(settings):
    engine = make_engine("postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    app = create_app(settings, engine)
    answer = get(app, "/v1/jobs")
    assert (
        problem(answer, 503, "unavailable")["detail"] == "the database does not answer; try again"
    )
    assert "127.0.0.1" not in answer.text
    assert get(app, "/healthz").json() == {"status": "ok"}
    ready = get(app, "/readyz")
    assert ready.status_code == 503
    assert ready.json() == {"status": "not_ready", "database": "failed", "broker": "ok"}


def test_500_where_the_schema_is_not_ours(client: httpx.Client, engine):
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE api_keys RENAME TO api_keys_away")
    problem(client.get("/v1/jobs"), 500, "internal_error")


@pytest.mark.parametrize("given", ["", "with blank", "x" * 65, "a\xff", "{}"])
def test_a_malformed_request_id_is_replaced(client: httpx.Client, given: str):
    answer = client.get("/v1/jobs", headers={b"X-Request-ID": given.encode("latin-1")})
    assert answer.headers["x-request-id"].startswith("req_")


def test_a_problem_with_a_long_quote_is_cut(client: httpx.Client):
    answer = client.get("/v1/jobs/" + "a" * 100)
    assert len(answer.content) < 3000
    answer = client.post("/v1/jobs", json={**JOB, "name": "\N{SNOWMAN}" * 300_000})
    assert answer.status_code == 422
    assert len(answer.content) < 10_000
