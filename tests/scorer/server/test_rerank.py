"""The rerank paths, checked by what their official clients send and read, and by arithmetic of our own."""

import asyncio
import json
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import cohere
import httpx
import pytest
from tests.support.scorers import live_app, running_app, served

from tevatron.core.prompts import Pair
from tevatron.scorer.engines.base import EngineInfo
from tevatron.scorer.engines.fake import FakeEngine
from tevatron.scorer.server import ServerOptions

DOCUMENTS = ["carrots are orange", "the capital is Reykjavik", "", "cellos have four strings"]
QUERY = "capital of Iceland"


class _FixedEngine:
    """Gives the scores of a list, in turn, or raises."""

    def __init__(self, *scores):
        self.scores = list(scores)

    def score(self, token_ids):
        got = [self.scores.pop(0) for _ in token_ids]
        for one in got:
            if isinstance(one, Exception):
                raise one
        return got

    def info(self):
        return EngineInfo(dtype="float32", device="cpu", max_batch_tokens=2048)


def _expected(documents=DOCUMENTS, query=QUERY, **changes):
    """Return the raw scores, and the order that they give."""
    renderer = served(**changes).renderer
    ids = [renderer.render(Pair(query=query, text=text)).ids for text in documents]
    scores = FakeEngine().score(ids)
    return scores, sorted(range(len(scores)), key=lambda place: -scores[place])


def _post(path, body, *, engine=None, options=None, **changes):
    answer = []

    async def inner():
        what = served(engine, **changes)
        async with running_app(lambda: what, options) as client:
            answer.append(await client.post(path, json=body))

    asyncio.run(inner())
    return answer[0]


@pytest.fixture(scope="module")
def url():
    with live_app(served) as url:
        yield url


def _sigmoid(score):
    return 1 / (1 + math.exp(-score))


def test_the_cohere_sdk_v2(url):
    with httpx.Client() as own:
        client = cohere.ClientV2(api_key="any", base_url=url, httpx_client=own)
        response = client.rerank(
            model="rerank-v4.0", query=QUERY, documents=DOCUMENTS, top_n=3, max_tokens_per_doc=4096
        )
    scores, order = _expected()
    assert [one.index for one in response.results] == order[:3]
    assert [one.relevance_score for one in response.results] == pytest.approx(
        [_sigmoid(scores[place]) for place in order[:3]]
    )
    assert response.id.startswith("rerank-")
    assert response.meta.api_version.version == "2"
    assert response.meta.billed_units.search_units == 1


def test_the_cohere_sdk_v1(url):
    with httpx.Client() as own:
        response = cohere.Client(api_key="any", base_url=url, httpx_client=own).rerank(
            model="rerank-v3.5",
            query=QUERY,
            documents=[{"text": text, "id": "own"} for text in DOCUMENTS],
            return_documents=True,
        )
    _, order = _expected()
    assert [one.index for one in response.results] == order
    assert [one.document.text for one in response.results] == [DOCUMENTS[at] for at in order]


def test_the_cohere_sdk_reads_our_errors(url):
    with httpx.Client() as own:
        client = cohere.ClientV2(api_key="any", base_url=url, httpx_client=own)
        with pytest.raises(cohere.UnprocessableEntityError) as caught:
            client.rerank(model="m", query="x" * 5000, documents=DOCUMENTS)
    assert "leaves no room for a passage" in caught.value.body["detail"]


def test_the_request_of_langchains_jina_client(url):
    # langchain_community.document_compressors.JinaRerank, 0.4.2: what it sends and the keys that it reads.
    data = {"query": QUERY, "documents": DOCUMENTS, "model": "jina-reranker-v1", "top_n": 2}
    answer = httpx.post(f"{url}/v1/rerank", json=data, trust_env=False).json()
    _, order = _expected()
    assert [one["index"] for one in answer["results"]] == order[:2]
    # Jina's own documentation promises these too.
    assert answer["results"][0]["document"] == {"text": DOCUMENTS[order[0]]}
    assert answer["usage"]["total_tokens"] > 0
    assert answer["model"] == "fake"


LITELLM = {
    "hosted_vllm/m": {"top_n": 3},
    "cohere/m": {"top_n": 3},
    "jina_ai/m": {"top_n": 3},
    "huggingface/m": {"top_n": 3},
    "hosted_vllm/cut": {"max_tokens_per_doc": 5},
}
"""What litellm is asked for, by its provider: vLLM's, Cohere's, Jina's and TEI's form."""


@pytest.fixture(scope="module")
def by_litellm(url):
    """What litellm makes of our answers, by model."""
    common = {"api_base": url, "api_key": "any", "query": QUERY, "documents": DOCUMENTS}
    asked = [{"model": model, **common, **own} for model, own in LITELLM.items()]
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.litellm_client"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[3],
        # Without it litellm fetches a table of prices when it is imported.
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "127.0.0.1"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return dict(zip(LITELLM, json.loads(ended.stdout), strict=True))


@pytest.mark.parametrize("model", ["hosted_vllm/m", "cohere/m", "jina_ai/m", "huggingface/m"])
def test_litellm(by_litellm, model):
    results = by_litellm[model]
    scores, order = _expected()
    assert [one["index"] for one in results] == order[:3]
    assert [one["relevance_score"] for one in results] == pytest.approx(
        [_sigmoid(scores[place]) for place in order[:3]]
    )


@pytest.mark.parametrize("model", ["hosted_vllm/m", "jina_ai/m", "huggingface/m"])
def test_litellm_has_the_documents_back(by_litellm, model):
    texts = [one["document"]["text"] for one in by_litellm[model]]
    assert texts == [DOCUMENTS[at] for at in _expected()[1][:3]]


def test_litellm_has_documents_cut(by_litellm):
    # A byte is a token here.
    scores, order = _expected([text[:5] for text in DOCUMENTS])
    assert [(one["index"], one["relevance_score"]) for one in by_litellm["hosted_vllm/cut"]] == [
        (place, pytest.approx(_sigmoid(scores[place]))) for place in order
    ]


def test_max_tokens_per_doc_says_what_it_cut(url):
    body = {"query": QUERY, "documents": DOCUMENTS, "max_tokens_per_doc": 5}
    answer = httpx.post(f"{url}/rerank", json=body, trust_env=False).json()
    cut = {one["index"]: one["truncated_tokens"] for one in answer["results"]}
    # Five of 18, 24, 0 and 24 bytes are kept.
    assert cut == {0: 13, 1: 19, 2: 0, 3: 19}


def test_teis_raw_scores(url):
    body = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": True}
    answer = httpx.post(f"{url}/rerank", json=body, trust_env=False).json()
    scores, order = _expected()
    assert answer == [{"index": at, "score": pytest.approx(scores[at])} for at in order]


@pytest.mark.parametrize("asked", [{"raw_scores": True}, {"use_activation": False}])
def test_raw_scores_are_those_of_score(asked):
    answer = _post("/v2/rerank", {"query": QUERY, "documents": DOCUMENTS, **asked}).json()
    scores, order = _expected()
    assert [one["relevance_score"] for one in answer["results"]] == [scores[at] for at in order]


def test_the_sigmoid_is_taken_once_and_never_decides_the_order():
    # 0.5 to 0.73 would be a sigmoid of a sigmoid; 40 and 50 are both 1.0 as sigmoids.
    engine = _FixedEngine(0.0, 40.0, 50.0, -800.0)
    answer = _post("/v2/rerank", {"query": "q", "documents": ["a", "b", "c", "d"]}, engine=engine)
    results = answer.json()["results"]
    assert [one["index"] for one in results] == [2, 1, 0, 3]
    assert [one["relevance_score"] for one in results] == [1.0, 1.0, 0.5, 0.0]


def test_equal_scores_keep_the_order_of_the_request():
    answer = _post(
        "/rerank", {"query": "q", "documents": ["a", "b", "c"]}, engine=_FixedEngine(1.0, 1.0, 1.0)
    )
    assert [one["index"] for one in answer.json()["results"]] == [0, 1, 2]


def test_a_documents_title_is_a_part_of_the_prompt():
    document = {"title": "Reykjavik", "text": "It is the capital.", "url": "not read"}
    answer = _post("/v2/rerank", {"query": "q", "documents": [document], "raw_scores": True})
    ids = (
        served().renderer.render(Pair(query="q", title="Reykjavik", text="It is the capital.")).ids
    )
    assert answer.json()["results"][0]["relevance_score"] == FakeEngine().score([ids])[0]


def test_what_was_cut_is_reported_for_each_document():
    body = {"query": "q", "documents": ["short", "x" * 900]}
    results = _post("/v2/rerank", body).json()["results"]
    cut = {one["index"]: one["truncated_tokens"] for one in results}
    rendered = served().renderer.render(Pair(query="q", text="x" * 900))
    assert cut == {0: 0, 1: rendered.truncated_tokens}
    texts = {"query": "q", "texts": ["short", "x" * 900]}
    ranks = {one["index"]: one for one in _post("/rerank", texts).json()}
    assert "truncated_tokens" not in ranks[0]
    assert ranks[1]["truncated_tokens"] == rendered.truncated_tokens


@pytest.mark.parametrize(
    ("path", "asked", "returned"),
    [
        ("/rerank", {}, True),
        ("/v1/rerank", {}, True),
        ("/v2/rerank", {}, False),
        ("/rerank", {"return_documents": False}, False),
        ("/v2/rerank", {"return_documents": True}, True),
    ],
)
def test_documents_come_back_as_each_form_does_it(path, asked, returned):
    answer = _post(path, {"query": "q", "documents": ["a"], **asked}).json()
    assert ("document" in answer["results"][0]) == returned


@pytest.mark.parametrize(("top_n", "number"), [(0, 4), (1, 1), (99, 4), (None, 4)])
def test_top_n(top_n, number):
    body = {"query": "q", "documents": DOCUMENTS, "top_n": top_n}
    assert len(_post("/v1/rerank", body).json()["results"]) == number


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("rank_fields", ["title"], "a document's title and text are scored, nothing else"),
        ("max_chunks_per_doc", 3, "a document is scored once"),
        ("truncate_prompt_tokens", 500, "it would cut the end of the prompt"),
        ("truncate_prompt_tokens", -1, "it would cut the end of the prompt"),
        ("truncation_side", "left", "a passage is cut at its end"),
        ("max_tokens_per_query", 5, "a query is never shortened"),
        ("chat_template_kwargs", {"a": 1}, "the prompt template is the checkpoint's"),
        ("relevant_spans", {}, "documents are scored as a whole"),
    ],
)
def test_what_would_change_scores_is_refused_by_name(field, value, why):
    answer = _post("/v1/rerank", {"query": "q", "documents": ["a"], field: value})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(f"body: '{field}' is not supported: {why}")


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"documents": []}, "documents: List should have at least 1 item"),
        ({"documents": "a"}, "documents: Input should be a valid list"),
        ({"documents": [1]}, "documents.0"),
        ({"documents": [{"title": "no text"}]}, "documents.0"),
        ({"query": ["a"]}, "query: Input should be a valid string"),
        ({"top_n": -1}, "top_n: Input should be greater than or equal to 0"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"querry": "q"}, "querry: Extra inputs are not permitted"),
        ({"raw_scores": True, "use_activation": True}, "ask for different scores"),
    ],
)
def test_a_body_that_is_not_the_schema_is_422(change, detail):
    answer = _post("/v2/rerank", {"query": "q", "documents": ["a"], **change})
    assert answer.status_code == 422
    assert detail in answer.json()["detail"]


def test_an_instruction_is_refused_where_the_template_has_no_place_for_it():
    body = {"query": "q", "documents": ["a"], "instruction": "find jokes"}
    answer = _post("/rerank", body)
    assert answer.status_code == 422
    assert answer.json()["detail"] == "instruction: template 'tevatron' has no place for one"


def test_an_instruction_is_honoured_by_the_qwen3_template_without_a_contract():
    body = {"query": "q", "documents": ["a"], "instruction": "find jokes", "raw_scores": True}
    what = {"template": "qwen3_reranker", "max_length": 600}
    answer = _post("/rerank", body, **what)
    renderer = served(**what).renderer
    text = renderer.text(Pair(query="q", text="a", instruction="find jokes"))
    assert "<Instruct>: find jokes\n<Query>: q\n<Document>: a" in text
    ids = renderer.render(Pair(query="q", text="a", instruction="find jokes")).ids
    assert answer.json()["results"][0]["relevance_score"] == FakeEngine().score([ids])[0]


def test_another_instruction_than_the_contracts_is_refused():
    asked = {"query": "q", "documents": ["a"]}
    what = {"template": "qwen3_reranker", "max_length": 600, "max_probe_difference": 0.0}
    answer = _post("/rerank", {**asked, "instruction": "find jokes"}, **what)
    assert answer.status_code == 422
    assert (
        "instruction differs: this scorer was trained with 'Given a web" in answer.json()["detail"]
    )
    own = served(**what).renderer.template.instruction
    assert _post("/rerank", {**asked, "instruction": own}, **what).status_code == 200


@pytest.mark.parametrize(
    ("change", "status", "kind", "error"),
    [
        ({"texts": []}, 413, "Validation", "`texts` cannot be empty"),
        ({"texts": ["a"] * 10_001}, 413, "Validation", "batch size 10001 > maximum allowed"),
        ({"texts": ["x" * 900], "truncate": False}, 413, "Validation", "texts.0 (and 0 more)"),
        ({"query": "x" * 5000}, 413, "Validation", "texts.0: query 'xxx"),
        ({"texts": [1]}, 422, "Validation", "texts.0: Input should be a valid string"),
        ({"truncation_direction": "Left"}, 422, "Validation", "truncation_direction"),
    ],
)
def test_teis_errors(change, status, kind, error):
    answer = _post("/rerank", {"query": "q", "texts": ["a"], **change})
    assert answer.status_code == status
    assert answer.json().keys() == {"error", "error_type"}
    assert answer.json()["error_type"] == kind
    assert error in answer.json()["error"]


@pytest.mark.parametrize("score", [RuntimeError("out of memory"), float("nan")])
def test_teis_error_of_a_backend_that_fails_is_424(score):
    answer = _post("/rerank", {"query": "q", "texts": ["a"]}, engine=_FixedEngine(score))
    assert (answer.status_code, answer.json()["error_type"]) == (424, "Backend")


def test_teis_error_of_a_full_queue_is_429_with_retry_after():
    entered, gate = threading.Event(), threading.Event()

    class Gated(FakeEngine):
        def score(self, token_ids):
            entered.set()
            assert gate.wait(20)
            return super().score(token_ids)

    async def inner():
        options = ServerOptions(max_requests=1)
        async with running_app(lambda: served(Gated()), options) as client:
            body = {"query": "q", "texts": ["a"]}
            first = asyncio.create_task(client.post("/rerank", json=body))
            assert await asyncio.to_thread(entered.wait, 10)
            # Too many requests: which form it is in is not read any more, and the problem document says it.
            assert (await client.post("/rerank", json=body)).status_code == 429
            gate.set()
            assert (await first).status_code == 200

    asyncio.run(inner())


def test_teis_error_of_a_deadline_is_429_overloaded():
    class Slow(FakeEngine):
        def score(self, token_ids):
            threading.Event().wait(0.6)
            return super().score(token_ids)

    answer = _post(
        "/rerank",
        {"query": "q", "texts": ["a"]},
        engine=Slow(),
        options=ServerOptions(deadline_s=0.1),
    )
    assert (answer.status_code, answer.json()["error_type"]) == (429, "Overloaded")
    assert int(answer.headers["retry-after"]) >= 1
