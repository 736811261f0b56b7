from __future__ import annotations

import socket
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI
from sqlalchemy import select
from tests.support.asgi import get

from tevatron.api.app import create_app
from tevatron.api.security import OPEN_PATHS, is_loopback
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.models import ApiKey
from tevatron.core.store.session import Sessions


def operations(app: FastAPI) -> list[tuple[str, str]]:
    return [
        (method.upper(), path.replace("{ref}", "job_1"))
        for path, found in app.openapi()["paths"].items()
        for method in found
    ]


def test_every_route_needs_a_key_once_there_is_one(app: FastAPI, client: httpx.Client, make_key):
    make_key("alice")
    walked = [
        *operations(app),
        ("GET", "/openapi.json"),
        ("GET", "/no/such/path"),
        ("PATCH", "/v1/jobs"),
    ]
    assert len(walked) > 25
    for method, path in walked:
        answer = client.request(method, path)
        if path in OPEN_PATHS:
            assert answer.status_code in (200, 503), path
            continue
        assert answer.status_code == 401, (method, path)
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["code"] == "unauthorized"


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer tvt_wrong",
        "Bearer",
        "Basic dXNlcjpwYXNz",
        "tvt_wrong",
        "Bearer " + "x" * 5000,
        "Bearer \xff\xfe",
    ],
)
def test_a_wrong_key_is_refused(client: httpx.Client, make_key, authorization: str):
    make_key("alice")
    answer = client.get("/v1/jobs", headers={b"Authorization": authorization.encode("latin-1")})
    assert answer.status_code == 401


def test_a_wrong_key_is_refused_before_there_is_any(client: httpx.Client):
    assert client.get("/v1/jobs", headers={"Authorization": "Bearer x"}).status_code == 401


def test_a_revoked_key_is_refused_at_once(
    client_of: Callable[[str], httpx.Client], make_key, sessions: Sessions
):
    make_key("other")
    key_id, secret = make_key("alice")
    alice = client_of(secret)
    assert alice.get("/v1/jobs").status_code == 200
    with sessions.begin() as session:
        KeyRepository(session).revoke(key_id)
    assert alice.get("/v1/jobs").status_code == 401


def test_the_database_holds_no_secret(alice: httpx.Client, sessions: Sessions):
    secret = alice.headers["authorization"].removeprefix("Bearer ")
    alice.get("/v1/jobs")
    with sessions.begin() as session:
        row = session.scalars(select(ApiKey)).one()
        stored = " ".join(str(value) for value in vars(row).values())
    assert secret not in stored
    assert row.last_used_at is not None


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000", "LOCALHOST"],
)
def test_a_loopback_host_needs_no_key_before_there_is_one(client: httpx.Client, host: str):
    assert client.get("/v1/jobs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "testserver",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "localhost@evil.example",
        "localhost:80@evil.example",
        "evil.example#localhost",
        "127.0.0.1,evil.example",
        "0.0.0.0",
        "192.168.0.1",
        "[::2]",
        "[::1",
        "",
    ],
)
def test_a_foreign_host_is_refused_without_a_key(client: httpx.Client, host: str):
    answer = client.get("/v1/jobs", headers={"Host": host})
    assert answer.status_code == 403
    assert answer.json()["code"] == "forbidden"


def test_a_foreign_origin_is_refused_without_a_key(client: httpx.Client):
    assert client.get("/v1/jobs", headers={"Origin": "https://evil.example"}).status_code == 403
    assert client.get("/v1/jobs", headers={"Origin": "null"}).status_code == 403
    assert client.get("/v1/jobs", headers={"Origin": "http://localhost:3000"}).status_code == 200


def test_a_key_works_under_any_host(alice: httpx.Client):
    headers = {"Host": "tevatron.example", "Origin": "https://tevatron.example"}
    assert alice.get("/v1/jobs", headers=headers).status_code == 200


def test_without_a_key_only_a_loopback_address_is_served(settings, engine):
    app = create_app(settings.model_copy(update={"api_host": "0.0.0.0"}), engine)
    answer = get(app, "/v1/jobs")
    assert answer.status_code == 401
    assert "tevatron keys create" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True)]
    + [
        (host, False)
        for host in ("0.0.0.0", "::", "", "10.0.0.1", "127.1", "2130706433", "localhost.")
    ],
)
def test_is_loopback(host: str, expected: bool):
    assert is_loopback(host) is expected


def test_a_request_without_any_host_header_is_refused(server_url: str):
    address = server_url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1]))) as connection:
        connection.sendall(b"GET /v1/jobs HTTP/1.0\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 403")
