"""Two keys and every route: what is another key's does not exist."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI
from tests.support.resources import TOKEN, make_resources

from tevatron.core.store.jobs import JobRepository
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.repository import EveryKey

REFS = {
    "/v1/jobs/{ref}": "job",
    "/v1/jobs/{ref}:cancel": "job",
    "/v1/jobs/{ref}:resume": "job",
    "/v1/jobs/{ref}:save": "job",
    "/v1/jobs/{ref}:stop": "job",
    "/v1/jobs/{ref}/events": "job",
    "/v1/jobs/{ref}/log": "job",
    "/v1/checkpoints/{ref}": "checkpoint",
    "/v1/models/{ref}": "model",
    "/v1/datasets/{ref}": "dataset",
    "/v1/datasets/{ref}/content": "awaiting",
    "/v1/scorers/{ref}": "scorer",
    "/v1/evaluations/{ref}": "evaluation",
    "/v1/evaluations/{ref}/values": "evaluation",
    "/v1/evaluations/{ref}/comparison": "evaluation",
    "/v1/webhooks/{ref}": "webhook",
    "/v1/webhooks/{ref}/deliveries": "webhook",
}
QUERY = {"/v1/evaluations/{ref}/comparison": "?baseline={ref}"}
"""What a route demands besides the path; a baseline of another key's would be found out here too."""
LISTS = [
    "/v1/jobs",
    "/v1/checkpoints",
    "/v1/models",
    "/v1/datasets",
    "/v1/scorers",
    "/v1/evaluations",
    "/v1/webhooks",
]


@pytest.fixture
def owned(sessions, alice, bob, admin) -> dict[str, str]:
    """Ids of one resource of each kind that belongs to alice."""
    with sessions.begin() as session:
        key = next(key for key in KeyRepository(session).list_all() if key.name == "alice")
        return make_resources(session, key_id=key.id)


def walk(app: FastAPI, owned: dict[str, str]) -> list[tuple[str, str]]:
    """Return every operation on one resource, at alice's ids; a new route must be named in REFS."""
    return [
        (method.upper(), (path + QUERY.get(path, "")).replace("{ref}", owned[REFS[path]]))
        for path, operations in app.openapi()["paths"].items()
        for method in operations
        if "{ref}" in path
    ]


def send(client: httpx.Client, method: str, path: str) -> httpx.Response:
    if method == "PUT":
        headers = {"Content-Type": "application/octet-stream"}
        return client.put(path, content=b"q1 d1 1.0\n", headers=headers)
    return client.request(method, path)


def test_nothing_of_another_key_can_be_read_or_changed(app, alice, bob, owned):
    walked = walk(app, owned)
    assert len(walked) == 19
    for method, path in walked:
        answer = send(bob, method, path)
        assert answer.status_code == 404, (method, path, answer.text)
    for method, path in walked:
        if method == "GET" and not path.endswith("/log"):
            assert alice.get(path).status_code == 200, path
    assert alice.get(f"/v1/jobs/{owned['job']}").json()["state"] == "queued"
    assert alice.get(f"/v1/scorers/{owned['scorer']}").json()["state"] == "ready"
    assert alice.get(f"/v1/datasets/{owned['awaiting']}").json()["state"] == "awaiting_content"


def test_lists_show_a_keys_own_rows(alice, bob, owned):
    for path in LISTS:
        assert len(alice.get(path).json()["data"]) >= 1, path
        assert bob.get(path).json()["data"] == [], path


def test_an_administrator_sees_all(admin, owned, app):
    for path in LISTS:
        assert len(admin.get(path).json()["data"]) >= 1, path
    # Deletions last: nothing of a webhook can be read after its own.
    for method, path in sorted(walk(app, owned), key=lambda operation: operation[0] == "DELETE"):
        if not path.endswith("/log"):
            answer = send(admin, method, path)
            # The job is seen, and does not train.
            expected = (409,) if path.endswith((":save", ":stop")) else (200, 202, 204)
            assert answer.status_code in expected, (method, path, answer.text)


def test_a_job_cannot_use_what_is_another_keys(bob, owned):
    bodies = [
        {"kind": "train", "model": owned["model"], "dataset": "train"},
        {"kind": "eval", "dataset": owned["dataset"]},
        {"kind": "export", "train": owned["job"]},
    ]
    for body in bodies:
        assert bob.post("/v1/jobs", json=body).status_code == 404
    unknown = bob.post("/v1/jobs", json={"kind": "export", "train": {"from": "job_1"}})
    answer = bob.post("/v1/jobs", json={"kind": "export", "train": {"from": owned["job"]}})
    assert answer.status_code == unknown.status_code == 422
    # In the very words that an id has which nobody's job has.
    assert answer.json()["detail"].replace(owned["job"], "job_1") == unknown.json()["detail"]
    for body in ({"checkpoint": owned["checkpoint"]}, {"checkpoint": "tune"}):
        assert bob.post("/v1/scorers", json=body).status_code == 404


def test_the_names_in_an_error_are_a_keys_own(bob, owned):
    assert "tune" not in bob.get("/v1/checkpoints/tone").text


def test_no_answer_holds_a_scorers_token_or_a_webhooks_secret(admin, app, owned):
    for path in [
        *LISTS,
        *(path for method, path in walk(app, owned) if method == "GET"),
        "/metrics",
    ]:
        text = admin.get(path).text
        assert TOKEN not in text, path
        assert "whsec_" not in text, path


def test_the_same_name_and_idempotency_key_belong_to_each_key(
    alice, bob, training_file, model_folder
):
    ids = set()
    for client in (alice, bob):
        client.post("/v1/models", json={"name": "tiny", "path": str(model_folder)})
        client.post(
            "/v1/datasets", json={"name": "rows", "kind": "training", "path": str(training_file)}
        )
        answer = client.post(
            "/v1/jobs",
            json={"kind": "train", "model": "tiny", "dataset": "rows"},
            headers={"Idempotency-Key": "same"},
        )
        ids.add(answer.json()["jobs"][0]["id"])
    assert len(ids) == 2


def test_rows_made_without_a_key_are_the_administrators(client, alice, admin, sessions):
    with sessions.begin() as session:
        ids = make_resources(session, key_id=None)
    assert alice.get(f"/v1/jobs/{ids['job']}").status_code == 404
    assert admin.get(f"/v1/jobs/{ids['job']}").status_code == 200


def test_an_administrator_may_use_what_it_sees(admin, alice, sessions):
    with sessions.begin() as session:
        ids = make_resources(session, key_id=None)
    jobs = {
        "fit": {"kind": "train", "model": "base", "dataset": "train"},
        "half": {"kind": "export", "train": ids["job"]},
        "scored": {"kind": "eval", "dataset": "corpus", "rerank": {"checkpoint": "tune"}},
        "served": {"kind": "eval", "dataset": "corpus", "rerank": {"scorers": ["served"]}},
    }
    for name, spec in jobs.items():
        assert alice.post("/v1/jobs", json=spec).status_code == 404, name
    answer = admin.post("/v1/jobs", json={"jobs": jobs})
    assert answer.status_code == 202, answer.text
    with sessions() as session:
        stored = {
            row.name: row for row in JobRepository(session).list_jobs(key_id=EveryKey()).items
        }
        roots = [key.id for key in KeyRepository(session).list_all() if key.name == "root"]
    assert stored["fit"].resolved["model"] == ids["model"]
    assert stored["scored"].resolved["rerank"]["checkpoint"] == ids["checkpoint"]
    assert [stored[name].key_id for name in jobs] == roots * 4


def test_of_several_of_one_name_an_administrator_gets_its_own(admin, alice, model_folder):
    mine, hers = (
        client.post("/v1/models", json={"name": "tiny", "path": str(model_folder)}).json()["id"]
        for client in (admin, alice)
    )
    assert admin.get("/v1/models/tiny").json()["id"] == mine
    assert alice.get("/v1/models/tiny").json()["id"] == hers
