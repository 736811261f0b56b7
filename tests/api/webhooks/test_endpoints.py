"""Webhooks over REST: made with a secret that is shown once, listed, deleted with what was to be sent."""

from __future__ import annotations

import base64

from tests.support.store import eval_job, submit

from tevatron.core.store.jobs import JobRepository


def test_a_webhook_is_made_shown_and_deleted(client, sessions):
    answer = client.post("/v1/webhooks", json={"url": "https://hooks.example/a", "name": "chat"})
    assert answer.status_code == 201, answer.text
    made = answer.json()
    secret = made.pop("secret")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert answer.headers["Location"] == f"/v1/webhooks/{made['id']}"
    assert client.get("/v1/webhooks/chat").json() == made
    assert client.get("/v1/webhooks").json()["data"] == [made]
    [job_id] = submit(sessions, a=eval_job())
    with sessions.begin() as session:
        JobRepository(session).request_cancel(job_id, key_id=None)
    [delivery] = client.get("/v1/webhooks/chat/deliveries").json()["data"]
    assert (delivery["job_id"], delivery["state"], delivery["attempts"]) == (job_id, "pending", 0)
    assert delivery["payload"]["type"] == "job.cancelled"
    assert client.delete(f"/v1/webhooks/{made['id']}").status_code == 204
    assert client.get("/v1/webhooks/chat").status_code == 404
    assert client.get("/v1/webhooks").json()["data"] == []


def test_a_url_that_nothing_would_be_sent_to_is_refused(client):
    answer = client.post("/v1/webhooks", json={"url": "https://10.0.0.1/"})
    assert answer.status_code == 403
    assert "10.0.0.1, which is not a public address" in answer.json()["detail"]
    assert client.post("/v1/webhooks", json={"url": "ftp://a.example/"}).status_code == 422


def test_a_key_has_twenty_webhooks_at_most(client):
    body = {"url": "https://hooks.example/"}
    answers = [client.post("/v1/webhooks", json=body) for _ in range(21)]
    assert [answer.status_code for answer in answers] == [201] * 20 + [409]
    assert "20 webhooks" in answers[-1].json()["detail"]


def test_a_keys_webhook_hears_of_its_own_jobs_alone(alice, bob, training_file, model_folder):
    for client in (alice, bob):
        client.post("/v1/models", json={"name": "tiny", "path": str(model_folder)})
        client.post(
            "/v1/datasets", json={"name": "rows", "kind": "training", "path": str(training_file)}
        )
        client.post("/v1/webhooks", json={"url": "https://hooks.example/", "name": "mine"})
    job = alice.post("/v1/jobs", json={"kind": "train", "model": "tiny", "dataset": "rows"})
    alice.post(f"/v1/jobs/{job.json()['jobs'][0]['id']}:cancel")
    assert len(alice.get("/v1/webhooks/mine/deliveries").json()["data"]) == 1
    assert bob.get("/v1/webhooks/mine/deliveries").json()["data"] == []
