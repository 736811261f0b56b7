"""Places of other file systems: what is allowed, what is fetched and sent, and what each failure says."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from tevatron.core.errors import ConfigError, ForbiddenError, InputError, TooLargeError
from tevatron.core.remote import (
    check_remote,
    fetch_file,
    fetch_folder,
    hub_repository,
    send_folder,
)

ROOTS = ["s3://team/data/", "file:///srv/shared"]


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("url", ["s3://team/data/train.jsonl", "file:///srv/shared/a/b"])
def test_what_lies_under_a_root_is_allowed(url: str):
    check_remote(url, ROOTS, field="url")


@pytest.mark.parametrize(
    "url",
    [
        "s3://team/data",
        "s3://team/database/x",
        "s3://other/data/x",
        "gs://team/data/x",
        "file:///etc/passwd",
    ],
)
def test_anything_else_is_forbidden(url: str):
    with pytest.raises(ForbiddenError, match=r"url: .* under none of the prefixes .*REMOTE_ROOTS"):
        check_remote(url, ROOTS, field="url")


@pytest.mark.parametrize(
    "url",
    [
        "/srv/shared/x",
        "s3://",
        "s3://team/data/../../other/x",
        "s3://team/data/%2e%2e/%2e%2e/x",
        "s3://team/data/%252e%252e/x",
        "s3://team/data/*.jsonl",
        "s3://team/data/x::file:///etc/passwd",
        "s3://team/data//x",
        "s3://team@evil/data/x",
        "s3://team/data/x y",
        "s3://team/data/x\n",
    ],
)
def test_a_url_that_could_leave_its_root_is_refused(url: str):
    with pytest.raises(InputError, match=r"^to: expected a URL"):
        check_remote(url, ROOTS, field="to")


def test_a_file_is_fetched(memory, tmp_path: Path):
    memory.pipe("/team/train.jsonl", b"one\n")
    fetch_file("memory://team/train.jsonl", tmp_path / "got", max_bytes=4)
    assert (tmp_path / "got").read_bytes() == b"one\n"


def test_a_file_that_is_too_large_is_refused(memory, tmp_path: Path):
    memory.pipe("/team/train.jsonl", b"12345")
    with pytest.raises(TooLargeError, match="5 bytes, over the limit of 4"):
        fetch_file("memory://team/train.jsonl", tmp_path / "got", max_bytes=4)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://team/nothing", "expected a file, found nothing"),
        ("memory://team", "expected a file, found something else"),
        ("nosuch://team/x", r"cannot be read: ValueError: Protocol not known: nosuch"),
        ("s3://team/x", "its file system needs a package: Install s3fs"),
    ],
)
def test_what_cannot_be_fetched_says_why(memory, tmp_path: Path, url: str, message: str):
    memory.pipe("/team/train.jsonl", b"one\n")
    with pytest.raises(ConfigError, match=f"^{url}: .*{message}"):
        fetch_file(url, tmp_path / "got", max_bytes=100)


def test_of_a_folder_only_what_is_meant_is_fetched(memory, tmp_path: Path):
    for name in ("corpus.jsonl", "qrels/test.tsv", "README.md", "other/corpus.txt"):
        memory.pipe(f"/beir/{name}", name.encode())
    fetch_folder(
        "memory://beir", ["corpus.jsonl*", "qrels/*.tsv"], tmp_path / "got", max_bytes=1000
    )
    found = {
        path.relative_to(tmp_path / "got").as_posix(): path.read_text()
        for path in (tmp_path / "got").rglob("*")
        if path.is_file()
    }
    assert found == {"corpus.jsonl": "corpus.jsonl", "qrels/test.tsv": "qrels/test.tsv"}


def test_a_folder_is_sent_and_its_last_file_comes_last(memory, tmp_path: Path, monkeypatch):
    for name in ("reranker.json", "model.safetensors", "zz/extra.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    memory.pipe("/out/reranker.json", b"of an earlier attempt")
    written: list[str] = []
    opened = type(memory).open

    def note(self, path, mode="rb", **kwargs):
        if "w" in mode:
            written.append(path)
            assert not self.exists("/out/reranker.json")
        return opened(self, path, mode, **kwargs)

    monkeypatch.setattr(type(memory), "open", note)
    send_folder(tmp_path, "memory://out", last="reranker.json")
    assert [path.rpartition("out/")[2] for path in written] == [
        "model.safetensors",
        "zz/extra.json",
        "reranker.json",
    ]
    assert memory.cat("/out/zz/extra.json") == b"zz/extra.json"


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("a")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written: (NotADirectory|FileExists)Error"):
        send_folder(tmp_path / "in", f"file://{tmp_path}/file/below", last="a")


def test_a_repository_of_the_hub_is_told_from_other_places():
    assert hub_repository("hf://acme/tiny-1.0", field="to") == "acme/tiny-1.0"
    assert hub_repository("s3://acme/tiny", field="to") is None


@pytest.mark.parametrize(
    "url", ["hf://acme", "hf://acme/a/b", "hf://datasets/a/b", "hf://acme/.x", "hf://acme/a%2fb"]
)
def test_what_is_no_model_repository_is_refused(url: str):
    with pytest.raises(
        InputError, match=r"^to: expected a model repository of the hub, hf://owner/"
    ):
        hub_repository(url, field="to")
