"""Datasets by hub id: fetched from a small hub by huggingface_hub itself, read, and kept here."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.api.conftest import write_beir
from tests.support.hub import Hub, ask_at

ROWS = {"name": "rows", "kind": "training", "hub_id": "owner/rows", "revision": "v1"}
BEIR = {"name": "beir", "kind": "beir", "hub_id": "owner/beir", "revision": "main"}


@pytest.fixture
def settings(settings):
    return settings.model_copy(update={"allow_hub": True})


@pytest.fixture
def hub(monkeypatch, tmp_path, training_file: Path):
    hub = Hub()
    ask_at(hub.url, monkeypatch, tmp_path / "cache")
    rows = tmp_path / "hub rows" / "data"
    rows.mkdir(parents=True)
    (rows / "train.jsonl").write_bytes(training_file.read_bytes())
    (rows / "broken.jsonl").write_text('{"query": "q"}\n')
    (rows / "large.jsonl").write_bytes(b" " * (5 * 2**20))
    hub.add("datasets", "owner/rows", rows.parent, tag="v1")
    write_beir(tmp_path / "hub beir")
    (tmp_path / "hub beir" / "README.md").write_text("words")
    hub.add("datasets", "owner/beir", tmp_path / "hub beir")
    yield hub
    hub.close()


def left_over(data: Path) -> list[str]:
    return sorted(path.name for path in (data / "datasets").glob("*"))


@pytest.mark.usefixtures("hub")
def test_a_file_of_the_hub_is_read_and_kept(client: httpx.Client, settings):
    answer = client.post("/v1/datasets", json={**ROWS, "file": "data/train.jsonl"})
    assert answer.status_code == 201, answer.text
    found = answer.json()
    assert (found["state"], found["stats"]) == (
        "ready",
        {"rows": 3, "positives": 3, "negatives": 6},
    )
    assert (found["hub_id"], found["revision"], found["file"]) == (
        "owner/rows",
        "v1",
        "data/train.jsonl",
    )
    assert found["path"] == f"datasets/{found['id']}/content"
    assert (settings.data / found["path"]).read_text().count("\n") == 3
    assert client.get("/v1/datasets/rows").json() == found
    assert left_over(settings.data) == [found["id"]]


@pytest.mark.usefixtures("hub")
def test_a_beir_repository_serves_an_eval_job(client: httpx.Client, settings):
    found = client.post("/v1/datasets", json=BEIR).json()
    assert found["stats"] == {"documents": 2, "queries": 1, "splits": {"test": 1}}
    folder = settings.data / found["path"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "corpus.jsonl",
        "qrels",
        "queries.jsonl",
    ]
    answer = client.post("/v1/jobs", json={"kind": "eval", "dataset": "beir"})
    assert answer.status_code == 202
    answer = client.post("/v1/jobs", json={"kind": "eval", "dataset": "beir", "split": "dev"})
    assert answer.status_code == 422
    assert "unknown split 'dev'; there are: test" in answer.json()["detail"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (
            {**ROWS, "file": "data/broken.jsonl"},
            422,
            "content:1: field 'positive_passages': expected a list",
        ),
        ({**ROWS, "file": "data/none.jsonl"}, 422, "has no file data/none.jsonl"),
        ({**ROWS, "file": "data/large.jsonl"}, 413, "over the limit of 4194304"),
        ({**BEIR, "hub_id": "owner/rows"}, 422, "has no file corpus.jsonl*"),
        ({**BEIR, "hub_id": "owner/none"}, 422, "cannot be fetched from the hub"),
        ({**BEIR, "revision": "v2"}, 422, "cannot be fetched from the hub"),
        (ROWS, 422, "file goes with hub_id"),
        ({**BEIR, "file": "corpus.jsonl"}, 422, "file goes with hub_id"),
        ({"name": "x", "kind": "training", "file": "a"}, 422, "file goes with hub_id"),
        ({**BEIR, "path": "/x"}, 422, "expected one of path, hub_id and url, or none, got several"),
        ({**BEIR, "hub_id": "alone"}, 422, "/hub_id"),
    ],
)
@pytest.mark.usefixtures("hub")
def test_what_cannot_be_had_is_refused_and_leaves_nothing(
    client: httpx.Client, settings, body: dict[str, str], status: int, message: str
):
    answer = client.post("/v1/datasets", json=body)
    assert answer.status_code == status, answer.text
    assert message in answer.json()["detail"]
    assert client.get("/v1/datasets").json()["data"] == []
    assert left_over(settings.data) == []


def test_a_name_that_is_taken_is_refused_before_anything_is_fetched(hub: Hub, client):
    assert client.post("/v1/datasets", json=BEIR).status_code == 201
    hub.fetched.clear()
    answer = client.post("/v1/datasets", json=BEIR)
    assert answer.status_code == 409
    assert answer.json()["detail"] == "a dataset named 'beir' exists already"
    assert hub.fetched == []


class TestWithoutTheHub:
    @pytest.fixture
    def settings(self, settings):
        return settings.model_copy(update={"allow_hub": False})

    def test_a_hub_id_is_refused(self, client: httpx.Client):
        answer = client.post("/v1/datasets", json=BEIR)
        assert answer.status_code == 403
        assert "TEVATRON_ALLOW_HUB" in answer.json()["detail"]
