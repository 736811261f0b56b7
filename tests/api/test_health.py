from __future__ import annotations

import httpx
from pydantic import SecretStr
from tests.support.asgi import get
from tests.support.resources import make_resources

from tevatron.api.app import create_app


def test_probes_answer_without_a_key(client: httpx.Client, make_key):
    make_key("alice")
    assert client.get("/healthz").json() == {"status": "ok"}
    answer = client.get("/readyz")
    assert answer.status_code == 200
    assert answer.json() == {"status": "ready", "database": "ok", "broker": "ok"}


def test_a_dead_broker_is_named(settings, engine):
    url = SecretStr("redis://127.0.0.1:1/0")
    answer = get(create_app(settings.model_copy(update={"broker_url": url}), engine), "/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"status": "not_ready", "database": "ok", "broker": "failed"}


def test_another_schema_is_not_ready(client: httpx.Client, engine):
    with engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '0000'")
    assert client.get("/readyz").json()["database"] == "failed"


def test_metrics_count_jobs_and_requests_without_ids(client: httpx.Client, sessions):
    with sessions.begin() as session:
        ids = make_resources(session, key_id=None)
    client.get(f"/v1/jobs/{ids['job']}")
    client.request("BREW", "/v1/jobs")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    lines = answer.text.splitlines()
    assert 'rr_jobs{kind="train",state="queued"} 1.0' in lines
    assert 'rr_jobs{kind="eval",state="failed"} 0.0' in lines
    assert 'rr_scorers{state="ready"} 1.0' in lines
    (age,) = [line for line in lines if line.startswith('rr_job_queue_seconds{kind="train"}')]
    assert 0 < float(age.split()[-1]) < 300
    assert 'rr_http_requests_total{method="GET",route="/v1/jobs/{ref}",status="200"} 1.0' in lines
    assert any('method="other"' in line for line in lines)
    assert not any(value in answer.text for value in ids.values())
