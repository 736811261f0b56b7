import asyncio
import json
import threading

import httpx
import pytest
from tests.support.scorers import served

from tevatron.core.prompts import Pair
from tevatron.scorer.engines.base import EngineInfo
from tevatron.scorer.engines.fake import FakeEngine
from tevatron.scorer.server import ServerOptions, create_app


class _GatedEngine:
    """Waits before each pass until the test lets it go on."""

    def __init__(self, result=None):
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.passes = []
        self._result = result

    def score(self, token_ids):
        self.entered.set()
        assert self.gate.wait(20)
        self.passes.append([len(ids) for ids in token_ids])
        if isinstance(self._result, Exception):
            raise self._result
        return [1.0 if self._result is None else self._result for _ in token_ids]

    def info(self):
        return EngineInfo(dtype="float32", device="cpu")


def _open_engine(result):
    engine = _GatedEngine(result)
    engine.gate.set()
    return engine


def _run(test, *, engine=None, options=None, **changes):
    """Run an async test against the app, lifespan included."""

    async def inner():
        what = served(engine, **changes)
        app = create_app(what, options)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(
                transport=httpx.ASGITransport(app, raise_app_exceptions=False),
                base_url="http://scorer",
            ) as client,
        ):
            await test(client, what)

    asyncio.run(inner())


def _candidates(*texts, query="q"):
    return [
        {"query_id": "1", "docid": f"d{place}", "query": query, "text": text}
        for place, text in enumerate(texts)
    ]


def _problem(response, status, code):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert (document["status"], document["code"]) == (status, code)
    assert document["type"] == f"urn:tevatron:problem:{code}"
    return document["detail"]


def test_scores_come_in_the_order_of_the_request_with_ids_and_truncation():
    async def test(client, what):
        texts = ["short", "x" * 900, "", "another"]
        response = await client.post("/score", json={"candidates": _candidates(*texts)})
        assert response.status_code == 200
        rendered = [what.renderer.render(Pair(query="q", text=text)) for text in texts]
        expected = FakeEngine().score([one.ids for one in rendered])
        assert response.json() == {
            "scores": [
                {
                    "query_id": "1",
                    "docid": f"d{place}",
                    "score": expected[place],
                    "missing": False,
                    "truncated_tokens": rendered[place].truncated_tokens,
                }
                for place in range(4)
            ]
        }
        assert response.json()["scores"][1]["truncated_tokens"] > 600

    _run(test)


def test_the_reference_clients_body_is_taken():
    async def test(client, what):
        body = {
            "candidates": [
                {"query_id": "1", "docid": "d", "query": "q", "text": "t", "title": "A-B"}
            ],
            "query_prefix": "query:",
            "passage_prefix": "passage:",
        }
        assert (await client.post("/score", json=body)).status_code == 200

    _run(test)


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"{", "body: Invalid JSON"),
        (b"[]", "body: Input should be an object"),
        (b"{}", "candidates: Field required"),
        (b'{"candidates": []}', "candidates: List should have at least 1 item"),
        (
            b'{"candidates": [{"query_id": "1", "docid": "d"}]}',
            "candidates.0.query: Field required",
        ),
        (b'{"candidates": [{"query_id": 1, "docid": "d", "query": "q"}]}', "candidates.0.query_id"),
        (b'{"candidates": [{"query_id": "1", "docid": "d", "query": NaN}]}', "candidates.0.query"),
        (b'{"candidates": [{"query_id": "1", "docid": "d", "query": "\\ud800"}]}', "Invalid JSON"),
        (b'{"candidates": [{"query_id": "1", "docid": "d", "query": "\xff"}]}', "Invalid JSON"),
        (
            b'{"candidates": [{"query_id": "1", "docid": "d", "query": "q", "text": null}]}',
            "candidates.0.text",
        ),
        (b'{"candidates": [], "model": "x"}', "candidates: List should have"),
    ],
)
def test_a_body_that_is_not_the_schema_is_422(body, detail):
    async def test(client, what):
        headers = {"Content-Type": "application/json"}
        response = await client.post("/score", content=body, headers=headers)
        assert detail in _problem(response, 422, "invalid_input")

    _run(test)


def test_another_prefix_is_422():
    async def test(client, what):
        body = {"candidates": _candidates("x"), "passage_prefix": "document:"}
        detail = _problem(await client.post("/score", json=body), 422, "invalid_prompt")
        assert "passage_prefix differs" in detail
        assert "'passage:'" in detail
        assert "'document:'" in detail

    _run(test)


def test_a_query_that_fills_the_prompt_is_422_and_named():
    async def test(client, what):
        long = {"query_id": "long-one", "docid": "d", "query": "x" * 20_000, "text": "t"}
        candidates = [*_candidates("fine"), long]
        detail = _problem(
            await client.post("/score", json={"candidates": candidates}), 422, "query_too_long"
        )
        assert detail.startswith("query_id 'long-one': query 'xxx")
        assert "20000 characters" in detail

    _run(test)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_422_and_names_the_pair(score):
    async def test(client, what):
        response = await client.post("/score", json={"candidates": _candidates("x", "y")})
        detail = _problem(response, 422, "not_finite")
        assert detail.startswith(f"query '1', document 'd0' scores {score}")

    _run(test, engine=_open_engine(score))


def test_an_engine_that_raises_is_500_and_after_three_times_not_ready():
    async def test(client, what):
        for _ in range(3):
            assert (await client.get("/ready")).status_code == 200
            response = await client.post("/score", json={"candidates": _candidates("x")})
            assert "RuntimeError: out of memory" in _problem(response, 500, "engine_failed")
        assert "engine fails" in _problem(await client.get("/ready"), 503, "unavailable")
        assert (await client.get("/health")).json() == {"status": "ok"}

    _run(test, engine=_open_engine(RuntimeError("out of memory")))


def test_a_full_queue_is_429_with_retry_after():
    engine = _GatedEngine()

    async def test(client, what):
        body = {"candidates": _candidates(*["x" * 80] * 12)}
        first, second = [asyncio.create_task(client.post("/score", json=body)) for _ in range(2)]
        async with asyncio.timeout(10):
            await _waiting_tokens(client, 23 * 137)
        response = await client.post("/score", json=body)
        assert "tokens wait" in _problem(response, 429, "busy")
        assert int(response.headers["retry-after"]) >= 1
        engine.gate.set()
        assert [(await task).status_code for task in (first, second)] == [200, 200]

    # A prompt has 137 tokens and a pass takes one: 23 of 24 wait.
    _run(test, engine=engine, max_batch_tokens=150, options=ServerOptions(max_queue_tokens=3400))


async def _waiting_tokens(client, number):
    """Wait until so many tokens wait."""
    for _ in range(500):
        if f"queue_tokens {number}\n" in (await client.get("/metrics")).text:
            return
        await asyncio.sleep(0.02)


def test_a_request_that_does_not_begin_in_time_is_429():
    engine = _GatedEngine()

    async def test(client, what):
        first = asyncio.create_task(client.post("/score", json={"candidates": _candidates("x")}))
        assert await asyncio.to_thread(engine.entered.wait, 10)
        response = await client.post("/score", json={"candidates": _candidates("y")})
        assert "waited 1 s and did not begin" in _problem(response, 429, "busy")
        assert response.headers["retry-after"] == "1"
        engine.gate.set()
        assert (await first).status_code == 200
        assert len(engine.passes) == 1

    _run(test, engine=engine, options=ServerOptions(max_wait_s=1))


def test_too_many_requests_in_flight_are_429():
    engine = _GatedEngine()

    async def test(client, what):
        first = asyncio.create_task(client.post("/score", json={"candidates": _candidates("x")}))
        assert await asyncio.to_thread(engine.entered.wait, 10)
        response = await client.post("/score", json={"candidates": _candidates("y")})
        _problem(response, 429, "busy")
        engine.gate.set()
        assert (await first).status_code == 200

    _run(test, engine=engine, options=ServerOptions(max_requests=1))


def test_requests_share_passes():
    engine = _GatedEngine()

    async def test(client, what):
        def post(text):
            return asyncio.create_task(
                client.post("/score", json={"candidates": _candidates(text)})
            )

        first = post("a")
        assert await asyncio.to_thread(engine.entered.wait, 10)
        others = [post("b"), post("c")]
        async with asyncio.timeout(10):
            await _waiting_tokens(client, 2 * 58)
        engine.gate.set()
        assert [(await task).status_code for task in (first, *others)] == [200] * 3
        # The first ran alone because it was alone; the two that waited meanwhile ran together.
        assert engine.passes == [[58], [58, 58]]

    _run(test, engine=engine)


def test_the_event_loop_answers_while_the_engine_works():
    engine = _GatedEngine()

    async def test(client, what):
        first = asyncio.create_task(client.post("/score", json={"candidates": _candidates("x")}))
        assert await asyncio.to_thread(engine.entered.wait, 10)
        assert (await client.get("/health")).status_code == 200
        engine.gate.set()
        assert (await first).status_code == 200

    _run(test, engine=engine)


def test_info_says_what_is_served():
    async def test(client, what):
        info = (await client.get("/info")).json()
        assert (info["prompt_template"], info["yes_id"], info["no_id"]) == ("tevatron", 259, 261)
        assert info["max_length"] == 256

    _run(test)


def test_metrics_count():
    async def test(client, what):
        await client.post("/score", json={"candidates": _candidates("x", "y" * 900)})
        await client.post("/score", json={})
        text = (await client.get("/metrics")).text
        for line in (
            'tevatron_scorer_requests_total{status="200"} 1',
            'tevatron_scorer_requests_total{status="422"} 1',
            "tevatron_scorer_pairs_total 2",
            "tevatron_scorer_truncated_pairs_total 1",
            "tevatron_scorer_queue_tokens 0",
            "tevatron_scorer_requests_in_flight 0",
        ):
            assert line in text.splitlines()

    _run(test)


def test_a_token_is_asked_for_everywhere_but_by_probes():
    async def test(client, what):
        body = {"candidates": _candidates("x")}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for response in (
                await client.post("/score", json=body, headers=headers),
                await client.get("/info", headers=headers),
                await client.get("/metrics", headers=headers),
            ):
                _problem(response, 401, "unauthorized")
                assert response.headers["www-authenticate"] == "Bearer"
        good = {"Authorization": "Bearer secret"}
        assert (await client.post("/score", json=body, headers=good)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200

    _run(test, options=ServerOptions(token="secret"))


def test_a_large_body_is_413_declared_or_not():
    async def test(client, what):
        body = json.dumps({"candidates": _candidates("x" * 5000)}).encode()
        headers = {"Content-Type": "application/json"}
        _problem(await client.post("/score", content=body, headers=headers), 413, "too_large")

        async def chunks():
            for start in range(0, len(body), 500):
                yield body[start : start + 500]

        _problem(await client.post("/score", content=chunks(), headers=headers), 413, "too_large")

    _run(test, options=ServerOptions(max_body_bytes=1000))


def test_a_body_that_is_not_declared_as_json_is_415():
    async def test(client, what):
        response = await client.post(
            "/score", content=b"{}", headers={"Content-Type": "text/plain"}
        )
        assert "got 'text/plain'" in _problem(response, 415, "unsupported_media_type")

    _run(test)


def test_unknown_routes_and_methods_are_problems_too():
    async def test(client, what):
        _problem(await client.get("/nothing"), 404, "not_found")
        _problem(await client.get("/score"), 405, "method_not_allowed")

    _run(test)


def test_openapi_describes_the_body():
    async def test(client, what):
        operation = (await client.get("/openapi.json")).json()["paths"]["/score"]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        assert set(schema["properties"]) == {"candidates", "query_prefix", "passage_prefix"}

    _run(test)


def test_work_of_a_client_that_is_gone_is_not_done():
    engine = _GatedEngine()

    async def test(client, what):
        first = asyncio.create_task(client.post("/score", json={"candidates": _candidates("x")}))
        assert await asyncio.to_thread(engine.entered.wait, 10)
        await _call_and_leave(client, {"candidates": _candidates(*["y"] * 50)})
        engine.gate.set()
        assert (await first).status_code == 200
        assert [len(lengths) for lengths in engine.passes] == [1]

    _run(test, engine=engine)


async def _call_and_leave(client, body):
    """Call the app itself, with a client that closes its connection after the body."""
    app = client._transport.app
    messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
    gone = asyncio.Event()

    async def receive():
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        assert message.get("status") != 200

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/score",
        "raw_path": b"/score",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "headers": [(b"content-type", b"application/json")],
        "server": ("scorer", 80),
        "client": ("127.0.0.1", 1),
        "app": app,
        "state": {},
    }
    call = asyncio.create_task(app(scope, receive, send))
    await asyncio.sleep(0.1)
    gone.set()
    await asyncio.wait_for(call, 5)


def test_closing_answers_what_waits_with_503():
    engine = _GatedEngine()

    async def inner():
        what = served(engine)
        app = create_app(what)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://scorer") as client:
            async with app.router.lifespan_context(app):
                first = asyncio.create_task(
                    client.post("/score", json={"candidates": _candidates("x")})
                )
                assert await asyncio.to_thread(engine.entered.wait, 10)
                second = asyncio.create_task(
                    client.post("/score", json={"candidates": _candidates("y")})
                )
                await _waiting_tokens(client, 58)
                threading.Timer(0.2, engine.gate.set).start()
            _problem(await second, 503, "unavailable")
            assert (await first).status_code == 503

    asyncio.run(inner())
