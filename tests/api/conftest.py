"""The API on a real server with a real database.

- `settings` with a folder for datasets and one for models as the configured roots; `app`; `server_url`.
- `client`: without a key, over loopback. `alice`, `bob`, `admin`: with a key each, after which `client` gets 401.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from pydantic import SecretStr
from sqlalchemy import Engine
from tests.support.uvicorn_server import Server

from tevatron.api.app import create_app
from tevatron.core.settings import Settings
from tevatron.core.store.keys import KeyRepository
from tevatron.core.store.models import KeyRole
from tevatron.core.store.session import Sessions


@pytest.fixture
def dataset_root(tmp_path: Path) -> Path:
    root = tmp_path / "allowed datasets"
    root.mkdir()
    return root


@pytest.fixture
def model_root(tmp_path: Path) -> Path:
    root = tmp_path / "allowed models"
    root.mkdir()
    return root


@pytest.fixture
def settings(
    database_url: str, broker_url: str, tmp_path: Path, dataset_root: Path, model_root: Path
) -> Settings:
    return Settings(
        home=tmp_path / "home",
        data=tmp_path / "data",
        database_url=SecretStr(database_url),
        broker_url=SecretStr(broker_url),
        dataset_roots=[dataset_root],
        model_roots=[model_root],
        max_body_bytes=2**20,
        max_upload_bytes=4 * 2**20,
        scorer_allow=["http://scorer.example:8100/v1"],
        poll_s=0.1,
        kill_grace_s=0.5,
        republish_s=1.0,
        max_attempts=3,
    )


@pytest.fixture
def app(settings: Settings, engine: Engine) -> FastAPI:
    return create_app(settings, engine)


@pytest.fixture
def server_url(app: FastAPI) -> Iterator[str]:
    """Serve the application on a free port, in a thread of this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
    server = Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    app.state.context.closing.set()
    server.should_exit = True
    thread.join()
    listener.close()


@pytest.fixture
def client(server_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server_url, timeout=30, verify=False) as client:
        yield client


@pytest.fixture
def make_key(sessions: Sessions) -> Callable[..., tuple[str, str]]:
    """Return a function that makes a key and returns its id and its secret."""

    def make(name: str, role: KeyRole = KeyRole.USER) -> tuple[str, str]:
        with sessions.begin() as session:
            key, secret = KeyRepository(session).create(name, role=role)
            return key.id, secret

    return make


@pytest.fixture
def client_of(server_url: str) -> Iterator[Callable[[str], httpx.Client]]:
    """Return a function that makes a client with a key's secret."""
    with contextlib.ExitStack() as stack:

        def make(secret: str) -> httpx.Client:
            headers = {"Authorization": f"Bearer {secret}"}
            return stack.enter_context(
                httpx.Client(base_url=server_url, headers=headers, timeout=30, verify=False)
            )

        yield make


@pytest.fixture
def alice(client_of, make_key) -> httpx.Client:
    return client_of(make_key("alice")[1])


@pytest.fixture
def bob(client_of, make_key) -> httpx.Client:
    return client_of(make_key("bob")[1])


@pytest.fixture
def admin(client_of, make_key) -> httpx.Client:
    return client_of(make_key("root", KeyRole.ADMIN)[1])


@pytest.fixture
def training_file(dataset_root: Path) -> Path:
    """A training file of three rows under the configured root."""
    path = dataset_root / "train.jsonl"
    path.write_text("".join(json.dumps(training_row(number)) + "\n" for number in range(3)))
    return path


def training_row(number: int) -> dict[str, object]:
    return {
        "query_id": f"q{number}",
        "query": f"question {number}",
        "positive_passages": [{"docid": "d1", "title": "", "text": "yes"}],
        "negative_passages": [
            {"docid": "d2", "title": "", "text": "no"},
            {"docid": "d3", "text": "no"},
        ],
    }


@pytest.fixture
def beir_folder(dataset_root: Path) -> Path:
    """A BEIR folder of two documents and one query under the configured root."""
    folder = dataset_root / "beir"
    write_beir(folder)
    return folder


def write_beir(folder: Path) -> None:
    (folder / "qrels").mkdir(parents=True)
    documents = [{"_id": "d1", "title": "A", "text": "a"}, {"_id": "d2", "title": "", "text": "b"}]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(line) + "\n" for line in documents))
    (folder / "queries.jsonl").write_text(json.dumps({"_id": "q1", "text": "what is a"}) + "\n")
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nq1\td1\t1\n")


@pytest.fixture
def model_folder(model_root: Path) -> Path:
    """A folder that looks like a model; nothing in the API loads it."""
    folder = model_root / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    return folder
