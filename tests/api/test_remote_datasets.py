"""Datasets by URL: fetched through fsspec, read, and kept here."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.api.conftest import write_beir


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    folder = tmp_path / "bucket" / "team"
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def settings(settings, bucket: Path):
    return settings.model_copy(update={"remote_roots": [f"file://{bucket}", "hf://acme"]})


def left_over(data: Path) -> list[str]:
    return sorted(path.name for path in (data / "datasets").glob("*"))


def test_a_file_is_read_and_kept(client: httpx.Client, settings, bucket, training_file: Path):
    (bucket / "train.jsonl").write_bytes(training_file.read_bytes())
    url = f"file://{bucket}/train.jsonl"
    answer = client.post("/v1/datasets", json={"name": "rows", "kind": "training", "url": url})
    assert answer.status_code == 201, answer.text
    found = answer.json()
    assert (found["state"], found["url"], found["hub_id"]) == ("ready", url, None)
    assert found["stats"] == {"rows": 3, "positives": 3, "negatives": 6}
    assert (settings.data / found["path"]).read_bytes() == training_file.read_bytes()
    assert client.get("/v1/datasets/rows").json() == found
    assert left_over(settings.data) == [found["id"]]


def test_a_beir_folder_is_read_and_kept(client: httpx.Client, settings, bucket):
    write_beir(bucket / "beir")
    (bucket / "beir" / "README.md").write_text("words")
    body = {"name": "beir", "kind": "beir", "url": f"file://{bucket}/beir"}
    answer = client.post("/v1/datasets", json=body)
    assert answer.status_code == 201, answer.text
    kept = settings.data / answer.json()["path"]
    assert sorted(path.name for path in kept.iterdir()) == [
        "corpus.jsonl",
        "qrels",
        "queries.jsonl",
    ]


@pytest.mark.parametrize(
    ("name", "status", "detail"),
    [
        ("nothing.jsonl", 422, "expected a file, found nothing"),
        ("large.jsonl", 413, "over the limit"),
        ("broken.jsonl", 422, "content:1"),
        ("../elsewhere.jsonl", 422, "without '..'"),
    ],
)
def test_what_cannot_be_taken_leaves_nothing(
    client: httpx.Client, settings, bucket, name: str, status: int, detail: str
):
    (bucket / "broken.jsonl").write_text('{"query": "q"}\n')
    (bucket / "large.jsonl").write_bytes(b" " * (5 * 2**20))
    body = {"name": "rows", "kind": "training", "url": f"file://{bucket}/{name}"}
    answer = client.post("/v1/datasets", json=body)
    assert (answer.status_code, detail in answer.json()["detail"]) == (status, True), answer.text
    assert left_over(settings.data) == []
    assert client.get("/v1/datasets").json()["data"] == []


def test_a_url_outside_the_roots_is_forbidden(client: httpx.Client):
    body = {"name": "rows", "kind": "training", "url": "file:///etc/passwd"}
    answer = client.post("/v1/datasets", json=body)
    assert answer.status_code == 403
    assert "TEVATRON_REMOTE_ROOTS" in answer.json()["detail"]


def test_an_export_goes_only_where_the_operator_allows(client: httpx.Client):
    body = {"kind": "export", "train": "first", "to": "s3://elsewhere/x"}
    answer = client.post("/v1/jobs", json=body)
    assert answer.status_code == 403
    assert answer.json()["detail"].startswith("to: 's3://elsewhere/x' is under none")


@pytest.mark.parametrize(
    ("to", "status", "detail"),
    [
        # Where it may go, the first complaint is that there is no such train job.
        ("hf://acme/reranker", 404, "first"),
        ("hf://other/reranker", 403, "to: 'hf://other/reranker' is under none"),
        ("hf://acme/a/b", 422, "expected a model repository of the hub, hf://owner/name"),
    ],
)
def test_an_export_is_pushed_to_an_allowed_repository_only(
    client: httpx.Client, to: str, status: int, detail: str
):
    answer = client.post("/v1/jobs", json={"kind": "export", "train": "first", "to": to})
    assert (answer.status_code, detail in answer.json()["detail"]) == (status, True), answer.text


def test_two_sources_are_refused(client: httpx.Client, training_file: Path):
    body = {"name": "r", "kind": "training", "url": "s3://a/b", "path": str(training_file)}
    answer = client.post("/v1/datasets", json=body)
    assert answer.status_code == 422
    assert "expected one of path, hub_id and url" in answer.text
