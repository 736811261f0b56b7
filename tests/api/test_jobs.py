from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from tevatron.core.contracts.jobs import EventType, JobKind
from tevatron.core.store.claims import append_events, claim_next_job
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.lifecycle import NewEvent
from tevatron.core.store.session import Sessions

TRAIN = {"kind": "train", "name": "first", "model": "tiny", "dataset": "rows"}


@pytest.fixture
def registered(
    client: httpx.Client, training_file: Path, model_folder: Path, beir_folder: Path
) -> None:
    for path, body in (
        ("/v1/models", {"name": "tiny", "path": str(model_folder)}),
        ("/v1/datasets", {"name": "rows", "kind": "training", "path": str(training_file)}),
        ("/v1/datasets", {"name": "beir", "kind": "beir", "path": str(beir_folder)}),
    ):
        answer = client.post(path, json=body)
        assert answer.status_code == 201, answer.text


@pytest.mark.usefixtures("registered")
def test_a_submitted_job_is_queued_and_can_be_read(client: httpx.Client):
    answer = client.post("/v1/jobs", json=TRAIN)
    assert answer.status_code == 202
    (job,) = answer.json()["jobs"]
    assert answer.headers["location"] == f"/v1/jobs/{job['id']}"
    assert answer.headers["retry-after"] == "1"
    assert (job["kind"], job["name"], job["state"], job["attempt"]) == (
        "train",
        "first",
        "queued",
        0,
    )
    assert job["spec"]["model"] == "tiny"
    assert client.get(f"/v1/jobs/{job['id']}").json() == job
    assert client.get("/v1/jobs/first").json() == job


@pytest.mark.usefixtures("registered")
def test_several_jobs_are_stored_together_in_their_order(client: httpx.Client):
    body = {
        "jobs": {
            "table": {
                "kind": "eval",
                "dataset": "beir",
                "rerank": {"checkpoint": {"from": "model"}},
            },
            "model": {"kind": "train", "model": "tiny", "dataset": "rows"},
        }
    }
    answer = client.post("/v1/jobs", json=body)
    assert answer.status_code == 202
    table, model = answer.json()["jobs"]
    assert (table["name"], table["state"], table["depends_on"]) == (
        "table",
        "waiting",
        [model["id"]],
    )
    assert (model["name"], model["state"], model["depends_on"]) == ("model", "queued", [])


@pytest.mark.usefixtures("registered")
def test_one_wrong_spec_stores_none_of_the_group(client: httpx.Client):
    body = {"jobs": {"good": TRAIN, "bad": {**TRAIN, "dataset": "beir"}}}
    answer = client.post("/v1/jobs", json=body)
    assert answer.status_code == 422
    assert "dataset 'beir' is of kind beir" in answer.json()["detail"]
    assert client.get("/v1/jobs").json()["data"] == []


@pytest.mark.usefixtures("registered")
def test_an_unknown_reference_names_the_closest_match(client: httpx.Client):
    answer = client.post("/v1/jobs", json={**TRAIN, "model": "tinny"})
    assert answer.status_code == 404
    assert answer.json()["code"] == "not_found"
    assert "Did you mean 'tiny'?" in answer.json()["detail"]


def test_a_dataset_without_content_is_not_taken(client: httpx.Client, model_folder: Path):
    client.post("/v1/models", json={"name": "tiny", "path": str(model_folder)})
    client.post("/v1/datasets", json={"name": "rows", "kind": "training"})
    answer = client.post("/v1/jobs", json=TRAIN)
    assert answer.status_code == 409
    assert answer.json()["detail"] == "dataset 'rows' is awaiting_content; upload its content first"


@pytest.mark.usefixtures("registered")
def test_the_same_idempotency_key_gives_the_same_job(client: httpx.Client):
    first = client.post("/v1/jobs", json=TRAIN, headers={"Idempotency-Key": "one"})
    again = client.post("/v1/jobs", json=TRAIN, headers={"Idempotency-Key": "one"})
    other = client.post("/v1/jobs", json=TRAIN, headers={"Idempotency-Key": "two"})
    assert first.status_code == again.status_code == 202
    assert again.json() == first.json()
    assert other.json()["jobs"][0]["id"] != first.json()["jobs"][0]["id"]
    assert len(client.get("/v1/jobs").json()["data"]) == 2


@pytest.mark.usefixtures("registered")
def test_an_idempotency_key_with_another_body_is_refused(client: httpx.Client):
    client.post("/v1/jobs", json=TRAIN, headers={"Idempotency-Key": "one"})
    answer = client.post(
        "/v1/jobs", json={**TRAIN, "name": "second"}, headers={"Idempotency-Key": "one"}
    )
    assert answer.status_code == 422
    assert answer.json()["code"] == "idempotency_key_reused"
    assert len(client.get("/v1/jobs").json()["data"]) == 1


@pytest.mark.usefixtures("registered")
def test_twelve_concurrent_requests_of_one_key_make_one_job(client: httpx.Client):
    found: list[str] = []

    def submit() -> None:
        answer = client.post("/v1/jobs", json=TRAIN, headers={"Idempotency-Key": "one"})
        found.append(answer.json()["jobs"][0]["id"])

    threads = [threading.Thread(target=submit) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    assert len(set(found)) == 1
    assert len(client.get("/v1/jobs").json()["data"]) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "with blank", "caf\xe9"])
def test_a_malformed_idempotency_key_is_refused(client: httpx.Client, key: str):
    answer = client.post(
        "/v1/jobs", json=TRAIN, headers={b"Idempotency-Key": key.encode("latin-1")}
    )
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["parameter"] == "idempotency-key"


@pytest.mark.usefixtures("registered")
def test_a_queued_job_is_cancelled_at_once_and_again_without_harm(client: httpx.Client):
    job = client.post("/v1/jobs", json=TRAIN).json()["jobs"][0]
    for _ in range(2):
        answer = client.post(f"/v1/jobs/{job['id']}:cancel")
        assert answer.status_code == 202
        assert answer.json()["state"] == "cancelled"
    assert client.post(f"/v1/jobs/{job['id']}:cancel", json={}).status_code == 202


@pytest.mark.usefixtures("registered")
def test_pages_go_through_all_jobs_newest_first(client: httpx.Client):
    ids = [client.post("/v1/jobs", json=TRAIN).json()["jobs"][0]["id"] for _ in range(5)]
    found: list[str] = []
    after: dict[str, str] = {}
    sizes = []
    while True:
        page = client.get("/v1/jobs", params={"limit": 2, **after}).json()
        found += [job["id"] for job in page["data"]]
        sizes.append(len(page["data"]))
        assert page["has_more"] is (page["next"] is not None)
        if not page["has_more"]:
            break
        after = {"after": page["next"]}
        client.post("/v1/jobs", json=TRAIN)  # a new one shifts no page
    assert found == ids[::-1]
    assert sizes == [2, 2, 1]


@pytest.mark.usefixtures("registered")
def test_filters(client: httpx.Client):
    train = client.post("/v1/jobs", json=TRAIN).json()["jobs"][0]["id"]
    evaluation = client.post("/v1/jobs", json={"kind": "eval", "dataset": "beir"}).json()["jobs"][
        0
    ]["id"]
    client.post(f"/v1/jobs/{evaluation}:cancel")

    def ids(**filters: str) -> list[str]:
        return [job["id"] for job in client.get("/v1/jobs", params=filters).json()["data"]]

    assert ids(kind="train") == [train]
    assert ids(state="cancelled") == [evaluation]
    assert ids(name="first") == [train]
    assert ids(kind="eval", state="queued") == []


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("limit=0", "limit"),
        ("limit=101", "limit"),
        ("limit=x", "limit"),
        ("state=lost", "state"),
        ("kind=%00", "kind"),
        ("name=%00", "name"),
        ("name=../x", "name"),
    ],
)
def test_a_wrong_filter_is_named(client: httpx.Client, query: str, parameter: str):
    answer = client.get(f"/v1/jobs?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["parameter"] == parameter


@pytest.mark.parametrize(
    "cursor",
    ["x", "%00", "YWJj", "4pi6", "MjAyNi0wMS0wMXxqb2I", "MDAwMS0wMS0wMVQwMDowMDowMFp8AA=="],
)
def test_a_cursor_that_no_page_gave_is_refused(client: httpx.Client, cursor: str):
    answer = client.get(f"/v1/jobs?after={cursor}")
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"


def test_the_log_is_the_end_of_the_attempts_file(client: httpx.Client, registered: None, settings):
    job = client.post("/v1/jobs", json=TRAIN).json()["jobs"][0]
    assert client.get(f"/v1/jobs/{job['id']}/log").status_code == 404
    folder = settings.data / "runs" / job["id"]
    folder.mkdir(parents=True)
    (folder / "attempt-2.log").write_bytes(b"one\ntwo\nthr\xffee\n")
    answer = client.get(f"/v1/jobs/{job['id']}/log", params={"attempt": 2})
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.text == "one\ntwo\nthr\N{REPLACEMENT CHARACTER}ee\n"
    tail = client.get(f"/v1/jobs/{job['id']}/log", params={"attempt": 2, "max_bytes": 9})
    assert tail.text == "thr\N{REPLACEMENT CHARACTER}ee\n"


def test_a_link_in_place_of_the_log_is_not_followed(
    client: httpx.Client, registered: None, settings
):
    job = client.post("/v1/jobs", json=TRAIN).json()["jobs"][0]
    folder = settings.data / "runs" / job["id"]
    folder.mkdir(parents=True)
    (folder / "attempt-1.log").symlink_to("/etc/passwd")
    answer = client.get(f"/v1/jobs/{job['id']}/log", params={"attempt": 1})
    assert answer.status_code == 404
    assert "root:" not in answer.text


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("verb", ["save", "stop"])
def test_a_training_can_be_saved_and_stopped_and_nothing_else(
    client: httpx.Client, sessions: Sessions, verb: str
):
    job = client.post("/v1/jobs", json=TRAIN).json()["jobs"][0]
    refused = client.post(f"/v1/jobs/first:{verb}")
    assert refused.status_code == 409
    assert refused.json()["detail"] == (
        f"train job {job['id']} is queued; only a job that is training can save its state or stop"
    )
    with sessions.begin() as session:
        claim = claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
        assert claim is not None
        append_events(session, claim, [NewEvent(EventType.PHASE, {"phase": "training"})])
    answer = client.post(f"/v1/jobs/first:{verb}", json={})
    assert (answer.status_code, answer.json()["state"]) == (202, "running")
    events = client.get(f"/v1/jobs/{job['id']}/events").json()["data"]
    assert [event["data"]["message"] for event in events if event["type"] == "log"] == [
        {
            "save": "asked to save its state after this step",
            "stop": "asked to end after this step and to publish",
        }[verb]
    ]


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"arguments": {"eval_steps": 5}}, "eval_steps 5 needs validation, the held-out rows"),
        ({"validation": "rows"}, "validation is given, but eval_steps is 0"),
        (
            {"arguments": {"load_best_model_at_end": True}},
            "load_best_model_at_end needs evaluations, got eval_steps 0",
        ),
        (
            {"validation": "rows", "arguments": {"eval_steps": 5, "early_stopping_patience": 2}},
            "early_stopping_patience 2 needs load_best_model_at_end",
        ),
        (
            {
                "validation": "rows",
                "arguments": {"eval_steps": 5, "metric_for_best_model": "ndcg@10"},
            },
            "metric_for_best_model 'ndcg@10' decides nothing without load_best_model_at_end",
        ),
    ],
)
def test_validation_that_makes_no_sense_is_refused_by_name(
    client: httpx.Client, changes: dict[str, object], sentence: str
):
    answer = client.post("/v1/jobs", json={**TRAIN, **changes})
    assert answer.status_code == 422
    assert sentence in answer.text


def test_a_keys_limits_are_a_429_and_a_reason(
    sessions, client_of, make_key, training_file, model_folder
):
    key_id, secret = make_key("limited")
    with sessions.begin() as session:
        KeyRepository(session).limit(key_id, max_queued=2, max_running=1)
    client = client_of(secret)
    client.post("/v1/models", json={"name": "tiny", "path": str(model_folder)})
    client.post(
        "/v1/datasets", json={"name": "rows", "kind": "training", "path": str(training_file)}
    )
    answers = [client.post("/v1/jobs", json=TRAIN) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    problem = answers[2].json()
    assert (problem["code"], answers[2].headers["Retry-After"]) == ("too_many_jobs", "30")
    assert "would have 3 jobs waiting or queued, and it may have 2" in problem["detail"]
    with sessions.begin() as session:
        claim_next_job(session, [JobKind.TRAIN], worker="w", lease_s=60.0)
    running, queued = (
        client.get(f"/v1/jobs/{answer.json()['jobs'][0]['id']}").json() for answer in answers[:2]
    )
    assert running["held_back"] is None
    assert queued["held_back"] == "its key runs 1, as many as it may (max_running)"
