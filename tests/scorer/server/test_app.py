import asyncio
import json
import threading

import httpx
import pytest
from tests.support.scorers import running_app, served

from tevatron.core.errors import ConfigError, ContractError
from tevatron.core.prompts import Pair
from tevatron.scorer.engines.base import EngineInfo
from tevatron.scorer.engines.fake import FakeEngine
from tevatron.scorer.server import ServerOptions, create_app


class _GatedEngine:
    """Waits before each pass until the test lets it go on."""

    def __init__(self, result=None, max_batch_tokens=2048):
        self.max_batch_tokens = max_batch_tokens
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.passes = []
        self.result = result

    def score(self, token_ids):
        self.entered.set()
        assert self.gate.wait(20)
        self.passes.append([len(ids) for ids in token_ids])
        if isinstance(self.result, Exception):
            raise self.result
        return [1.0 if self.result is None else self.result for _ in token_ids]

    def info(self):
        return EngineInfo(dtype="float32", device="cpu", max_batch_tokens=self.max_batch_tokens)


def _open_engine(result):
    engine = _GatedEngine(result)
    engine.gate.set()
    return engine


def _run(test, *, engine=None, options=None, **changes):
    """Run an async test against the app, lifespan included."""

    async def inner():
        what = served(engine, **changes)
        async with running_app(lambda: what, options) as client:
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
        assert detail.startswith("query_id 'long-one', docid 'd': query 'xxx")
        assert "20000 characters" in detail

    _run(test)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_422_and_names_the_pair(score):
    async def test(client, what):
        response = await client.post("/score", json={"candidates": _candidates("x", "y")})
        detail = _problem(response, 422, "not_finite")
        assert detail.startswith(f"query_id '1', docid 'd0' scores {score}")

    _run(test, engine=_open_engine(score))


def test_an_engine_that_raises_is_500_and_after_three_times_not_ready():
    async def test(client, what):
        for _ in range(3):
            assert (await client.get("/ready")).status_code == 200
            response = await client.post("/score", json={"candidates": _candidates("x")})
            assert "RuntimeError: out of memory" in _problem(response, 500, "engine_failed")
        assert "engine fails" in _problem(await client.get("/ready"), 503, "engine_failed")
        _problem(await client.get("/health"), 503, "engine_failed")
        engine.result = None
        assert (
            await client.post("/score", json={"candidates": _candidates("x")})
        ).status_code == 200
        assert (await client.get("/ready")).status_code == 200

    engine = _open_engine(RuntimeError("out of memory"))
    _run(test, engine=engine)


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
    engine.max_batch_tokens = 150
    _run(test, engine=engine, options=ServerOptions(max_queue_tokens=3400))


async def _waiting_tokens(client, number):
    """Wait until so many tokens wait."""
    for _ in range(500):
        if f"queue_tokens {float(number)}\n" in (await client.get("/metrics")).text:
            return
        await asyncio.sleep(0.02)


def test_a_request_past_its_deadline_is_429_and_says_how_far_it_came():
    engine = _GatedEngine()

    async def test(client, what):
        first = asyncio.create_task(client.post("/score", json={"candidates": _candidates("x")}))
        assert await asyncio.to_thread(engine.entered.wait, 10)
        response = await client.post("/score", json={"candidates": _candidates("y")})
        assert "0 of 1 pairs were scored within 1 s" in _problem(response, 429, "busy")
        assert response.headers["retry-after"] == "1"
        assert (await first).status_code == 429
        engine.gate.set()
        response = await client.post("/score", json={"candidates": _candidates("z")})
        assert response.status_code == 200
        # What was given up while it waited is not run; what ran already when its deadline passed is.
        assert [len(lengths) for lengths in engine.passes] == [1, 1]

    _run(test, engine=engine, options=ServerOptions(deadline_s=1))


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
            'tevatron_scorer_requests_total{path="/score",status="200"} 1.0',
            'tevatron_scorer_requests_total{path="/score",status="422"} 1.0',
            "tevatron_scorer_pairs_total 2.0",
            "tevatron_scorer_prompt_tokens_total 314.0",
            "tevatron_scorer_truncated_pairs_total 1.0",
            "tevatron_scorer_truncated_tokens_total 701.0",
            "tevatron_scorer_queue_tokens 0.0",
            "tevatron_scorer_num_requests_running 0.0",
            "tevatron_scorer_num_requests_waiting 0.0",
            "tevatron_scorer_max_probe_difference NaN",
            "tevatron_scorer_ready 1.0",
        ):
            assert line in text.splitlines()
        for name in ("e2e_request_latency_seconds", "request_queue_time_seconds", "batch_tokens"):
            assert f"# TYPE tevatron_scorer_{name} histogram" in text

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


def test_openapi_describes_the_bodies():
    async def test(client, what):
        document = (await client.get("/openapi.json")).json()
        body = document["paths"]["/score"]["post"]["requestBody"]["content"]["application/json"]
        assert set(body["schema"]["properties"]) == {"candidates", "query_prefix", "passage_prefix"}
        assert "Candidate" in document["components"]["schemas"]

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
        async with running_app(lambda: served(engine)) as client:
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


def test_while_the_model_loads_the_server_says_so():
    gate = threading.Event()

    def load():
        assert gate.wait(20)
        return served()

    async def inner():
        app = create_app(load)
        transport = httpx.ASGITransport(app)
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://scorer") as client,
            app.router.lifespan_context(app),
        ):
            health = await client.get("/health")
            assert (health.status_code, health.json()) == (200, {"status": "starting"})
            assert _problem(await client.get("/ready"), 503, "starting") == (
                "the model is being loaded"
            )
            body = {"candidates": _candidates("x")}
            _problem(await client.post("/score", json=body), 503, "starting")
            texts = await client.post("/rerank", json={"query": "q", "texts": ["a"]})
            assert (texts.status_code, texts.json()["error_type"]) == (503, "Unhealthy")
            _problem(await client.get("/info"), 503, "starting")
            assert "tevatron_scorer_ready 0.0\n" in (await client.get("/metrics")).text
            gate.set()
            async with asyncio.timeout(20):
                while (await client.get("/ready")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert (await client.post("/score", json=body)).status_code == 200

    asyncio.run(inner())


def test_a_contract_that_is_not_kept_is_told_by_ready_and_health_and_never_scored():
    def load():
        raise ContractError("probe 3 scores differently: contract 1.0, got 2.0, allowed 0.001")

    async def inner():
        async with running_app(load) as client:
            for response in (
                await client.get("/ready"),
                await client.get("/health"),
                await client.get("/info"),
                await client.post("/score", json={"candidates": _candidates("x")}),
                await client.post("/v2/rerank", json={"query": "q", "documents": ["a"]}),
            ):
                detail = _problem(response, 503, "contract_mismatch")
                assert detail == "probe 3 scores differently: contract 1.0, got 2.0, allowed 0.001"

    asyncio.run(inner())


def test_a_model_that_cannot_be_loaded_ends_the_server():
    failures = []

    def load():
        raise ConfigError("no such thing")

    async def inner():
        app = create_app(load, on_failure=failures.append)
        async with app.router.lifespan_context(app), asyncio.timeout(20):
            while not failures:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(inner())
    assert [str(failure) for failure in failures] == ["no such thing"]


def test_the_proof_is_shown_in_metrics():
    async def test(client, what):
        text = (await client.get("/metrics")).text
        assert "tevatron_scorer_max_probe_difference 0.0004\n" in text
        assert 'tevatron_scorer_info{backend="fake"' in text

    _run(test, max_probe_difference=0.0004)


def test_rendering_a_large_request_does_not_make_a_small_one_wait():
    async def test(client, what):
        render_all = what.renderer.render_all

        def slowly(pairs):
            threading.Event().wait(0.02)
            return render_all(pairs)

        what.renderer.render_all = slowly
        body = {"candidates": _candidates(*["x"] * 5000)}
        big = asyncio.create_task(client.post("/score", json=body))
        await asyncio.sleep(0.2)
        async with asyncio.timeout(1):
            small = await client.post("/score", json={"candidates": _candidates("y")})
        assert small.status_code == 200
        assert not big.done()
        assert len((await big).json()["scores"]) == 5000

    _run(test)


def test_scoring_begins_before_a_large_request_is_rendered_whole():
    engine = _GatedEngine()

    async def test(client, what):
        render_all, parts = what.renderer.render_all, []

        def counted(pairs):
            parts.append(len(pairs))
            if len(parts) > 1:
                assert engine.entered.wait(10)
            return render_all(pairs)

        what.renderer.render_all = counted
        engine.gate.set()
        body = {"candidates": _candidates(*["x"] * 200)}
        assert (await client.post("/score", json=body)).status_code == 200
        assert parts == [64, 64, 64, 8]

    _run(test, engine=engine)
