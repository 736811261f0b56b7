import asyncio
import json
import threading

import pytest
from tests.support.scorers import (
    GatedEngine,
    candidates,
    problem,
    run_against_app,
    running_app,
    served,
)

from tevatron.core.prompts import Pair
from tevatron.scorer.engines.fake import FakeEngine
from tevatron.scorer.server import ServerOptions


def _open_engine(result):
    engine = GatedEngine(result)
    engine.gate.set()
    return engine


def test_scores_come_in_the_order_of_the_request_with_ids_and_truncation():
    async def test(client, what):
        texts = ["short", "x" * 900, "", "another"]
        response = await client.post("/score", json={"candidates": candidates(*texts)})
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

    run_against_app(test)


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

    run_against_app(test)


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
        assert detail in problem(response, 422, "invalid_input")

    run_against_app(test)


def test_another_prefix_is_422():
    async def test(client, what):
        body = {"candidates": candidates("x"), "passage_prefix": "document:"}
        detail = problem(await client.post("/score", json=body), 422, "invalid_prompt")
        assert "passage_prefix differs" in detail
        assert "'passage:'" in detail
        assert "'document:'" in detail

    run_against_app(test)


def test_a_query_that_fills_the_prompt_is_422_and_named():
    async def test(client, what):
        long = {"query_id": "long-one", "docid": "d", "query": "x" * 20_000, "text": "t"}
        both = [*candidates("fine"), long]
        detail = problem(
            await client.post("/score", json={"candidates": both}), 422, "query_too_long"
        )
        assert detail.startswith("query_id 'long-one', docid 'd': query 'xxx")
        assert "20000 characters" in detail

    run_against_app(test)


def test_a_pair_without_a_token_is_422_and_named():
    async def test(client, what):
        both = {"candidates": candidates("fine", "")}
        both["candidates"][1]["query"] = ""
        detail = problem(await client.post("/score", json=both), 422, "empty_prompt")
        assert detail.startswith("query_id '1', docid 'd1': the prompt has no tokens: expected")
        tei = await client.post("/rerank", json={"query": "", "texts": [""]})
        assert (tei.status_code, tei.json()["error_type"]) == (422, "Tokenizer")

    run_against_app(test, template="pair", query_prefix="", passage_prefix="")


def test_a_token_that_the_model_does_not_know_is_422_and_names_the_pair():
    """On a GPU the engine would not live on, and others' pairs fail with it."""
    engine = FakeEngine(vocab_size=256)

    async def test(client, what):
        # " yes" is one token that comes after the bytes.
        both = {"candidates": candidates("fine", "oh yes")}
        detail = problem(await client.post("/score", json=both), 422, "unknown_token")
        known = "the tokenizer gives id 259, the model knows 256 ids"
        assert detail == f"query_id '1', docid 'd1': {known}"
        rerank = {"query": "q", "documents": ["fine", "oh yes"]}
        assert known in problem(await client.post("/v2/rerank", json=rerank), 422, "unknown_token")
        alone = await client.post("/score", json={"candidates": candidates("fine")})
        assert alone.status_code == 200

    run_against_app(test, engine=engine)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_422_and_names_the_pair(score):
    async def test(client, what):
        response = await client.post("/score", json={"candidates": candidates("x", "y")})
        detail = problem(response, 422, "not_finite")
        assert detail.startswith(f"query_id '1', docid 'd0' scores {score}")

    run_against_app(test, engine=_open_engine(score))


def test_an_engine_that_raises_is_500_and_after_three_times_not_ready():
    async def test(client, what):
        for _ in range(3):
            assert (await client.get("/ready")).status_code == 200
            response = await client.post("/score", json={"candidates": candidates("x")})
            assert "RuntimeError: out of memory" in problem(response, 500, "engine_failed")
        assert "engine fails" in problem(await client.get("/ready"), 503, "engine_failed")
        problem(await client.get("/health"), 503, "engine_failed")
        engine.result = None
        assert (
            await client.post("/score", json={"candidates": candidates("x")})
        ).status_code == 200
        assert (await client.get("/ready")).status_code == 200

    engine = _open_engine(RuntimeError("out of memory"))
    run_against_app(test, engine=engine)


def test_a_full_queue_is_429_with_retry_after():
    engine = GatedEngine()

    async def test(client, what):
        body = {"candidates": candidates(*["x" * 80] * 12)}
        first, second = [asyncio.create_task(client.post("/score", json=body)) for _ in range(2)]
        async with asyncio.timeout(10):
            await _waiting_tokens(client, 23 * 137)
        response = await client.post("/score", json=body)
        assert "tokens wait" in problem(response, 429, "busy")
        assert int(response.headers["retry-after"]) >= 1
        engine.gate.set()
        assert [(await task).status_code for task in (first, second)] == [200, 200]

    # A prompt has 137 tokens and a pass takes one: 23 of 24 wait.
    engine.max_batch_tokens = 150
    run_against_app(test, engine=engine, options=ServerOptions(max_queue_tokens=3400))


async def _waiting_tokens(client, number):
    """Wait until so many tokens wait."""
    for _ in range(500):
        if f"queue_tokens {float(number)}\n" in (await client.get("/metrics")).text:
            return
        await asyncio.sleep(0.02)


def test_a_request_past_its_deadline_is_429_and_says_how_far_it_came():
    engine = GatedEngine()

    async def test(client, what):
        first = asyncio.create_task(client.post("/score", json={"candidates": candidates("x")}))
        assert await asyncio.to_thread(engine.entered.wait, 10)
        response = await client.post("/score", json={"candidates": candidates("y")})
        assert "0 of 1 pairs were scored within 1 s" in problem(response, 429, "busy")
        assert response.headers["retry-after"] == "1"
        assert (await first).status_code == 429
        engine.gate.set()
        response = await client.post("/score", json={"candidates": candidates("z")})
        assert response.status_code == 200
        # What was given up while it waited is not run; what ran already when its deadline passed is.
        assert [len(lengths) for lengths in engine.passes] == [1, 1]

    run_against_app(test, engine=engine, options=ServerOptions(deadline_s=1))


def test_too_many_requests_in_flight_are_429():
    engine = GatedEngine()

    async def test(client, what):
        first = asyncio.create_task(client.post("/score", json={"candidates": candidates("x")}))
        assert await asyncio.to_thread(engine.entered.wait, 10)
        response = await client.post("/score", json={"candidates": candidates("y")})
        problem(response, 429, "busy")
        engine.gate.set()
        assert (await first).status_code == 200

    run_against_app(test, engine=engine, options=ServerOptions(max_requests=1))


def test_requests_share_passes():
    engine = GatedEngine()

    async def test(client, what):
        def post(text):
            return asyncio.create_task(client.post("/score", json={"candidates": candidates(text)}))

        first = post("a")
        assert await asyncio.to_thread(engine.entered.wait, 10)
        others = [post("b"), post("c")]
        async with asyncio.timeout(10):
            await _waiting_tokens(client, 2 * 58)
        engine.gate.set()
        assert [(await task).status_code for task in (first, *others)] == [200] * 3
        # The first ran alone because it was alone; the two that waited meanwhile ran together.
        assert engine.passes == [[58], [58, 58]]

    run_against_app(test, engine=engine)


def test_the_event_loop_answers_while_the_engine_works():
    engine = GatedEngine()

    async def test(client, what):
        first = asyncio.create_task(client.post("/score", json={"candidates": candidates("x")}))
        assert await asyncio.to_thread(engine.entered.wait, 10)
        assert (await client.get("/health")).status_code == 200
        engine.gate.set()
        assert (await first).status_code == 200

    run_against_app(test, engine=engine)


def test_info_says_what_is_served():
    async def test(client, what):
        info = (await client.get("/info")).json()
        assert (info["prompt_template"], info["yes_id"], info["no_id"]) == ("tevatron", 259, 261)
        assert info["max_length"] == 256

    run_against_app(test)


def test_metrics_count():
    async def test(client, what):
        await client.post("/score", json={"candidates": candidates("x", "y" * 900)})
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

    run_against_app(test)


def test_a_token_is_asked_for_everywhere_but_by_probes():
    async def test(client, what):
        body = {"candidates": candidates("x")}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
            for response in (
                await client.post("/score", json=body, headers=headers),
                await client.get("/info", headers=headers),
                await client.get("/metrics", headers=headers),
            ):
                problem(response, 401, "unauthorized")
                assert response.headers["www-authenticate"] == "Bearer"
        good = {"Authorization": "Bearer secret"}
        assert (await client.post("/score", json=body, headers=good)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200

    run_against_app(test, options=ServerOptions(token="secret"))


def test_a_large_body_is_413_declared_or_not():
    async def test(client, what):
        body = json.dumps({"candidates": candidates("x" * 5000)}).encode()
        headers = {"Content-Type": "application/json"}
        problem(await client.post("/score", content=body, headers=headers), 413, "too_large")

        async def chunks():
            for start in range(0, len(body), 500):
                yield body[start : start + 500]

        problem(await client.post("/score", content=chunks(), headers=headers), 413, "too_large")

    run_against_app(test, options=ServerOptions(max_body_bytes=1000))


def test_a_body_that_is_not_declared_as_json_is_415():
    async def test(client, what):
        response = await client.post(
            "/score", content=b"{}", headers={"Content-Type": "text/plain"}
        )
        assert "got 'text/plain'" in problem(response, 415, "unsupported_media_type")

    run_against_app(test)


def test_unknown_routes_and_methods_are_problems_too():
    async def test(client, what):
        problem(await client.get("/nothing"), 404, "not_found")
        problem(await client.get("/score"), 405, "method_not_allowed")

    run_against_app(test)


def test_openapi_describes_the_bodies():
    async def test(client, what):
        document = (await client.get("/openapi.json")).json()
        body = document["paths"]["/score"]["post"]["requestBody"]["content"]["application/json"]
        assert set(body["schema"]["properties"]) == {"candidates", "query_prefix", "passage_prefix"}
        assert "Candidate" in document["components"]["schemas"]

    run_against_app(test)


def test_work_of_a_client_that_is_gone_is_not_done():
    engine = GatedEngine()

    async def test(client, what):
        first = asyncio.create_task(client.post("/score", json={"candidates": candidates("x")}))
        assert await asyncio.to_thread(engine.entered.wait, 10)
        await _call_and_leave(client, {"candidates": candidates(*["y"] * 50)})
        engine.gate.set()
        assert (await first).status_code == 200
        assert [len(lengths) for lengths in engine.passes] == [1]

    run_against_app(test, engine=engine)


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
    engine = GatedEngine()

    async def inner():
        async with running_app(lambda: served(engine)) as client:
            first = asyncio.create_task(client.post("/score", json={"candidates": candidates("x")}))
            assert await asyncio.to_thread(engine.entered.wait, 10)
            second = asyncio.create_task(
                client.post("/score", json={"candidates": candidates("y")})
            )
            await _waiting_tokens(client, 58)
            threading.Timer(0.2, engine.gate.set).start()
        problem(await second, 503, "unavailable")
        assert (await first).status_code == 503

    asyncio.run(inner())
