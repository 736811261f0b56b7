from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from tevatron.core.settings import Settings

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "media_type",
    [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/octet-stream",
    ],
)
def test_a_body_that_is_not_json_is_refused(client: httpx.Client, media_type: str):
    answer = client.post("/v1/jobs", content=b"{}", headers={"Content-Type": media_type})
    assert answer.status_code == 415
    assert answer.json()["code"] == "unsupported_media_type"
    assert "expected Content-Type application/json" in answer.json()["detail"]


def test_a_body_without_a_media_type_is_refused(client: httpx.Client):
    assert client.post("/v1/jobs", content=b"{}").status_code == 415
    assert client.post("/v1/jobs/x:cancel", content=chunks(1, 1)).status_code == 415


def test_json_is_not_a_datasets_content(client: httpx.Client):
    assert client.put("/v1/datasets/x/content", json={}).status_code == 415


def chunks(count: int, size: int) -> Iterator[bytes]:
    for _ in range(count):
        yield b" " * size


def test_a_body_over_the_limit_is_refused_by_its_length(client: httpx.Client, settings: Settings):
    answer = client.post("/v1/jobs", content=b" " * (settings.max_body_bytes + 1), headers=JSON)
    assert answer.status_code == 413
    assert answer.json()["detail"] == "the body is over the limit of 1048576 bytes"


def test_a_body_at_the_limit_is_read(client: httpx.Client, settings: Settings):
    answer = client.post("/v1/jobs", content=b" " * settings.max_body_bytes, headers=JSON)
    assert answer.status_code == 422


def test_a_chunked_body_over_the_limit_is_refused_while_it_comes(client: httpx.Client):
    answer = client.post("/v1/jobs", content=chunks(64, 2**20), headers=JSON)
    assert answer.status_code == 413
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_large_refused_body_still_gets_its_answer(client: httpx.Client, make_key):
    make_key("alice")
    answer = client.post("/v1/jobs", content=b" " * 64 * 2**20, headers=JSON)
    assert answer.status_code == 413
    answer = client.post("/v1/jobs", content=chunks(64, 2**20), headers=JSON)
    assert answer.status_code == 401


def test_a_million_chunks_of_one_byte_do_no_harm(server_url: str):
    host, port = server_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for _ in range(100):
            connection.sendall(b"1\r\n \r\n" * 1000)
        connection.sendall(b"0\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 422")


def test_a_client_that_stalls_does_not_hold_the_answer_of_a_refusal(server_url: str):
    host, port = server_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 100\r\n\r\n"
        )
        started = time.monotonic()
        assert connection.recv(65536).startswith(b"HTTP/1.1 415")
        assert time.monotonic() - started < 10
