from __future__ import annotations

import json

import httpx
import pytest

from tevatron.api.body import parse
from tevatron.api.problems import RefusedError

HEADERS = {"Content-Type": "application/json"}


def post(client: httpx.Client, content: bytes) -> httpx.Response:
    return client.post("/v1/datasets", content=content, headers=HEADERS)


@pytest.mark.parametrize(
    ("body", "pointer", "message"),
    [
        (rb'{"name": "a\u0000b", "kind": "training"}', "/name", "NUL"),
        (rb'{"name": "\ud800", "kind": "training"}', "/name", "surrogate"),
        (rb'{"na\udc00me": "a", "kind": "training"}', "/na?me", "surrogate"),
        (rb'{"name": "a", "kind": "training", "x": [1, {"y": "\u0000"}]}', "/x/1/y", "NUL"),
        (b'{"name": 1e999}', "/name", "beyond a 64-bit float"),
        (b'{"name": 9223372036854775808}', "/name", "beyond 64 bits"),
        (rb'"\u0000"', "/", "NUL"),
    ],
)
def test_what_postgres_or_a_number_cannot_hold_is_named(
    client: httpx.Client, body: bytes, pointer: str, message: str
):
    answer = post(client, body)
    assert answer.status_code == 422
    assert answer.headers["content-type"] == "application/problem+json"
    assert message in answer.json()["detail"]
    assert answer.json()["detail"].startswith(f"{pointer}:")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "Field required"),
        (b"{", "not JSON"),
        (b'{"a": NaN}', "NaN is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
        (b"\xff\xfe{", "byte 0 is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
        (b"1" * 5000, "an integer of 5000 characters"),
        (b"\xef\xbb\xbf{}", "not JSON"),
    ],
)
def test_what_is_no_json_is_a_422_that_says_why(client: httpx.Client, body: bytes, message: str):
    answer = post(client, body)
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


@pytest.mark.parametrize("body", [b"null", b"1", b'"a"', b"[]", b"[[[]]]", b"true"])
def test_another_json_value_than_an_object_is_a_422(client: httpx.Client, body: bytes):
    for path in ("/v1/jobs", "/v1/models", "/v1/datasets", "/v1/scorers"):
        answer = client.post(path, content=body, headers=HEADERS)
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"


def test_text_that_only_looks_like_an_escape_is_taken():
    value = {"a": "\\u0000 \\ud800", "b": "caf\xe9 \U0001f600", "c": -(2**63) + 1}
    assert parse(json.dumps(value).encode()) == value


def test_surrogate_pairs_are_characters():
    assert parse(rb'"\ud83d\ude00"') == "\U0001f600"


def test_a_deep_value_below_the_parsers_limit_is_walked_without_recursion():
    depth = 900
    with pytest.raises(RefusedError, match="nested too deeply"):
        parse(b"[" * 2_000_000)
    assert parse(b"[" * depth + b"]" * depth) is not None
