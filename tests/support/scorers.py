"""Something to serve, for tests of the scorer: the tiny tokenizer, and an engine that a test chooses."""

import asyncio
import socket
import threading
import time
from contextlib import asynccontextmanager, contextmanager

import httpx
import uvicorn
from tests.support.tiny_tokenizer import LightTokenizer

from tevatron.core.contracts.scores import ScorerInfo
from tevatron.core.contracts.train import Head
from tevatron.core.prompts import Renderer, get_template
from tevatron.scorer.engines.fake import FakeEngine
from tevatron.scorer.served import Served
from tevatron.scorer.server import create_app


def served(engine=None, *, max_length=256, template="tevatron", max_probe_difference=None):
    """Return the tiny tokenizer's renderer with an engine, the fake one by default."""
    engine = engine or FakeEngine()
    renderer = Renderer(get_template(template), LightTokenizer(), max_length=max_length)
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
    server = uvicorn.Server(
        uvicorn.Config(create_app(load, options), log_config=None, access_log=False)
    )
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
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError(f"{url} was not ready within 60 s")
