"""From loading to serving, and how requests share the threads: what the routes have in common."""

import asyncio
import threading

import httpx
from tests.support.scorers import (
    GatedEngine,
    candidates,
    problem,
    run_against_app,
    running_app,
    served,
)

from tevatron.core.errors import ConfigError, ContractError
from tevatron.scorer.server import create_app


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
            assert problem(await client.get("/ready"), 503, "starting") == (
                "the model is being loaded"
            )
            body = {"candidates": candidates("x")}
            problem(await client.post("/score", json=body), 503, "starting")
            texts = await client.post("/rerank", json={"query": "q", "texts": ["a"]})
            assert (texts.status_code, texts.json()["error_type"]) == (503, "Unhealthy")
            problem(await client.get("/info"), 503, "starting")
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
                await client.post("/score", json={"candidates": candidates("x")}),
                await client.post("/v2/rerank", json={"query": "q", "documents": ["a"]}),
            ):
                detail = problem(response, 503, "contract_mismatch")
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

    run_against_app(test, max_probe_difference=0.0004)


def test_rendering_a_large_request_does_not_make_a_small_one_wait():
    async def test(client, what):
        render_all, parts, begun = what.renderer.render_all, [], threading.Event()

        def slowly(pairs):
            parts.append(len(pairs))
            begun.set()
            threading.Event().wait(0.02)
            return render_all(pairs)

        what.renderer.render_all = slowly
        body = {"candidates": candidates(*["x"] * 5000)}
        big = asyncio.create_task(client.post("/score", json=body))
        assert await asyncio.to_thread(begun.wait, 60)
        small = await client.post("/score", json={"candidates": candidates("y")})
        assert small.status_code == 200
        assert not big.done()
        # Of 79 parts: an order, which a busy machine does not change as it does a time.
        assert parts.index(1) < 40
        assert len((await big).json()["scores"]) == 5000

    run_against_app(test)


def test_scoring_begins_before_a_large_request_is_rendered_whole():
    engine = GatedEngine()

    async def test(client, what):
        render_all, parts = what.renderer.render_all, []

        def counted(pairs):
            parts.append(len(pairs))
            if len(parts) > 1:
                assert engine.entered.wait(10)
            return render_all(pairs)

        what.renderer.render_all = counted
        engine.gate.set()
        body = {"candidates": candidates(*["x"] * 200)}
        assert (await client.post("/score", json=body)).status_code == 200
        assert parts == [64, 64, 64, 8]

    run_against_app(test, engine=engine)
