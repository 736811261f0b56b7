"""Something to serve, for tests of the scorer: the tiny tokenizer, and an engine that a test chooses."""

import asyncio
import socket
import threading
import time
from contextlib import asynccontextmanager, contextmanager

import httpx
import uvicorn
from tests.support.tiny_tokenizer import LightTokenizer
from tests.support.uvicorn_server import Server

from tevatron.core.contracts.scores import ScorerInfo
from tevatron.core.contracts.train import Head
from tevatron.core.prompts import Renderer, get_template
from tevatron.scorer.engines.base import EngineInfo
from tevatron.scorer.engines.fake import FakeEngine
from tevatron.scorer.served import Served
from tevatron.scorer.server import create_app


def served(
    engine=None, *, max_length=256, template="tevatron", max_probe_difference=None, **prefixes
):
    """Return the tiny tokenizer's renderer with an engine, the fake one by default."""
    engine = engine or FakeEngine()
    renderer = Renderer(get_template(template), LightTokenizer(), max_length=max_length, **prefixes)
    ids = renderer.answer_ids
    info = ScorerInfo(
        backend="fake",
        model_name_or_path="fake",
        prompt_template=template,
        head=Head.YES_NO,
        yes_id=ids.yes if ids else None,
        no_id=ids.no if ids else None,
        max_length=max_length,
        dtype=engine.info().dtype,
        max_probe_difference=max_probe_difference,
        versions={},
    )
    return Served(engine=engine, renderer=renderer, info=info)


@asynccontextmanager
async def running_app(load, options=None):
    """Run the app with its lifespan; yields a client once it is ready or says that it never will be."""
    app = create_app(load, options)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://scorer")
    async with app.router.lifespan_context(app), asyncio.timeout(60):
        while (await client.get("/health")).json().get("status") == "starting":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        yield client


@contextmanager
def live_app(load, options=None):
    """Serve the app on a port of this machine; yields its URL once it is ready."""
    server = Server(uvicorn.Config(create_app(load, options), log_config=None, access_log=False))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            _wait_until_ready(url)
            yield url
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive()


def _wait_until_ready(url):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/ready", trust_env=False, verify=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"{url} was not ready within 60 s")


class GatedEngine:
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


def run_against_app(test, *, engine=None, options=None, **changes):
    """Run an async test against the app, lifespan included."""

    async def inner():
        what = served(engine, **changes)
        async with running_app(lambda: what, options) as client:
            await test(client, what)

    asyncio.run(inner())


def candidates(*texts, query="q"):
    return [
        {"query_id": "1", "docid": f"d{place}", "query": query, "text": text}
        for place, text in enumerate(texts)
    ]


def problem(response, status, code):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    document = response.json()
    assert (document["status"], document["code"]) == (status, code)
    assert document["type"] == f"urn:tevatron:problem:{code}"
    return document["detail"]
