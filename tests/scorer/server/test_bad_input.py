"""Bad bodies by hand: each is answered 4xx with a reason, and the server scores rightly after all of them."""

import json

import httpx
import pytest
from tests.support.scorers import live_app, served

from tevatron.core.prompts import Pair
from tevatron.scorer.engines.fake import FakeEngine

JSON = {"Content-Type": "application/json"}
GOOD = {"query_id": "1", "docid": "d", "query": "q", "text": "t"}


@pytest.fixture(scope="module")
def client():
    with (
        live_app(served) as url,
        httpx.Client(base_url=url, trust_env=False, timeout=120, headers=JSON) as client,
    ):
        yield client
        # Whatever was sent: what is scored after it is right.
        answer = client.post("/score", json={"candidates": [GOOD]})
        ids = served().renderer.render(Pair(query="q", text="t")).ids
        assert answer.json()["scores"][0]["score"] == FakeEngine().score([ids])[0]


def _candidate(**changes):
    return json.dumps({"candidates": [{**GOOD, **changes}]}).encode()


BODIES = {
    "empty": b"",
    "not JSON": b"{candidates",
    "not UTF-8": b'{"candidates": [{"query_id": "1", "docid": "d", "query": "\xff"}]}',
    "null": b"null",
    "a list": b"[]",
    "a number": b"7",
    "deeply nested": b"[" * 100_000,
    "NaN for a text": b'{"candidates": [{"query_id": "1", "docid": "d", "query": NaN}]}',
    "Infinity for an id": b'{"candidates": [{"query_id": Infinity, "docid": "d", "query": "q"}]}',
    "a lone surrogate": _candidate(query="\ud800"),
    "a lone surrogate in an id": _candidate(docid="\udfff"),
    "a number for an id": _candidate(docid=7),
    "null for a text": _candidate(text=None),
    "a list for a query": _candidate(query=["q"]),
    "an empty id": _candidate(docid=""),
    "an id of 2,000 characters": _candidate(docid="d" * 2000),
    "an unknown field": _candidate(socre=1),
    "no candidates": b'{"candidates": []}',
    "10,001 candidates": json.dumps(
        {"candidates": [{**GOOD, "docid": str(at)} for at in range(10_001)]}
    ).encode(),
    "100,000 candidates": json.dumps(
        {"candidates": [{**GOOD, "docid": str(at)} for at in range(100_000)]}
    ).encode(),
    "a pair twice": json.dumps({"candidates": [GOOD, {**GOOD, "text": "other"}]}).encode(),
    "a text of 10 MB": _candidate(text="x" * 10_000_000),
    "a query of 10 MB": _candidate(query="x" * 10_000_000),
    "a query over the limit": _candidate(query="x" * 2000),
}


@pytest.mark.parametrize("what", BODIES)
def test_score(client, what):
    answer = client.post("/score", content=BODIES[what])
    assert answer.status_code == 422, answer.text[:300]
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.json()["detail"]
    assert len(answer.content) < 5000


def test_a_pair_that_is_there_twice_is_named(client):
    detail = client.post("/score", content=BODIES["a pair twice"]).json()["detail"]
    assert detail == "body: candidates.1: query_id '1' with docid 'd' is there twice"


def test_a_large_text_within_the_limit_is_cut_and_says_so(client):
    body = _candidate(text="word " * 190_000)
    score = client.post("/score", content=body).json()["scores"][0]
    assert score["truncated_tokens"] > 900_000


RERANK = {
    "not JSON": b"{",
    "a list": b"[1]",
    "no documents": b'{"query": "q", "documents": []}',
    "neither documents nor texts": b'{"query": "q"}',
    "both": b'{"query": "q", "documents": ["a"], "texts": ["b"]}',
    "100,000 documents": json.dumps({"query": "q", "documents": ["a"] * 100_000}).encode(),
    "NaN": b'{"query": "q", "documents": [NaN]}',
    "a lone surrogate": b'{"query": "q", "documents": ["\\ud800"]}',
    "a document of 10 MB": json.dumps({"query": "q", "documents": ["x" * 10_000_000]}).encode(),
    "a number": b'{"query": 7, "documents": ["a"]}',
    "a top_n that is none": b'{"query": "q", "documents": ["a"], "top_n": 1.5}',
    "a huge top_n": b'{"query": "q", "documents": ["a"], "top_n": -99999999999999999999}',
}


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
@pytest.mark.parametrize("what", RERANK)
def test_rerank(client, path, what):
    answer = client.post(path, content=RERANK[what])
    assert answer.status_code == 422, answer.text[:300]
    assert answer.json()["detail"]
    assert len(answer.content) < 5000


def test_documents_that_are_alike_each_get_a_place(client):
    body = {"query": "q", "documents": ["a", "b", "a"], "raw_scores": True}
    results = client.post("/v2/rerank", json=body).json()["results"]
    assert sorted(one["index"] for one in results) == [0, 1, 2]
    scores = {one["index"]: one["relevance_score"] for one in results}
    assert scores[0] == scores[2] != scores[1]
