from __future__ import annotations

import gzip
import io
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zstandard
from tests.api.conftest import training_row, write_beir

from tevatron.api.datasets.upload import remove_stale_parts

OCTETS = {"Content-Type": "application/octet-stream"}
ROWS = "".join(json.dumps(training_row(number)) + "\n" for number in range(20)).encode()


def create(client: httpx.Client, kind: str, name: str = "mine", **more: str) -> httpx.Response:
    return client.post("/v1/datasets", json={"name": name, "kind": kind, **more})


def upload(
    client: httpx.Client, content: bytes | Iterator[bytes], name: str = "mine"
) -> httpx.Response:
    return client.put(f"/v1/datasets/{name}/content", content=content, headers=OCTETS)


def beir_zip(tmp_path: Path, prefix: str = "") -> bytes:
    write_beir(tmp_path / "source")
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((tmp_path / "source").rglob("*")):
            archive.write(file, prefix + str(file.relative_to(tmp_path / "source")))
    return held.getvalue()


def left_over(data: Path) -> list[str]:
    return sorted(path.name for path in (data / "datasets").glob("*"))


# By path


def test_a_path_is_read_from_end_to_end(
    client: httpx.Client, training_file: Path, beir_folder: Path
):
    training = create(client, "training", "rows", path=str(training_file)).json()
    assert training["stats"] == {"rows": 3, "positives": 3, "negatives": 6}
    assert training["state"] == "ready"
    assert len(training["sha256"]) == 64
    beir = create(client, "beir", "beir", path=str(beir_folder)).json()
    assert beir["stats"] == {"documents": 2, "queries": 1, "splits": {"test": 1}}
    assert client.get("/v1/datasets/beir").json() == beir
    assert [row["name"] for row in client.get("/v1/datasets").json()["data"]] == ["beir", "rows"]


def test_a_broken_line_is_named_with_file_line_and_field(client: httpx.Client, dataset_root: Path):
    lines = [json.dumps(training_row(number)) for number in range(20)]
    path = dataset_root / "broken.jsonl"
    faults = [
        ('{"query": ', "not JSON", None),
        (
            json.dumps({**training_row(1), "positive_passages": []}),
            "at least one positive",
            "positive_passages",
        ),
        (json.dumps({**training_row(1), "query": "  "}), "expected a query", "query"),
        (
            json.dumps({**training_row(1), "positive_passages": [{"text": "", "title": ""}]}),
            "empty",
            "positive_passages[0].text",
        ),
        (
            json.dumps({"query": "a", "passages": [{"text": "b"}], "scores": [float("nan")]}),
            "finite",
            "scores[0]",
        ),
    ]
    for line, message, field in faults:
        path.write_text("\n".join([*lines[:16], line, *lines[17:]]))
        answer = create(client, "training", path=str(path))
        assert answer.status_code == 422
        problem = answer.json()
        assert problem["code"] == "invalid_format"
        (fault,) = problem["errors"]
        assert (fault["file"], fault["line"], fault.get("field")) == (str(path), 17, field)
        assert message in problem["detail"]
    assert client.get("/v1/datasets").json()["data"] == []


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("training", b"", "no rows"),
        ("ranklist", b"\n\n", "no rows"),
        ("ranklist", b"q1 d1\n", "expected 3 columns"),
        ("ranklist", b"q1 d1 nan\n", "is NaN, which has no place"),
        ("training", b"\x1f\x8b\x08broken", "broken gzip archive"),
        ("training", b"\xff\xfe", "not UTF-8"),
    ],
)
def test_an_unreadable_file_is_refused(
    client: httpx.Client, dataset_root: Path, kind: str, content: bytes, message: str
):
    path = dataset_root / "file"
    path.write_bytes(content)
    answer = create(client, kind, path=str(path))
    assert answer.status_code == 422
    assert message in answer.json()["detail"]


def test_kind_and_path_must_agree(client: httpx.Client, training_file: Path, beir_folder: Path):
    answer = create(client, "beir", path=str(training_file))
    assert (
        answer.json()["detail"] == "a dataset of kind beir is a folder, got a file: 'train.jsonl'"
    )
    answer = create(client, "training", path=str(beir_folder))
    assert answer.json()["detail"] == "a dataset of kind training is a file, got a folder: 'beir'"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "{root}/../secret.jsonl",
        "{root}/link.jsonl",
        "{root}/%2e%2e/secret.jsonl",
        "secret.jsonl",
    ],
)
def test_a_path_outside_the_root_is_refused(client: httpx.Client, dataset_root: Path, path: str):
    secret = dataset_root.parent / "secret.jsonl"
    secret.write_bytes(ROWS)
    (dataset_root / "link.jsonl").symlink_to(secret)
    answer = create(client, "training", path=path.replace("{root}", str(dataset_root)))
    assert answer.status_code == 422
    assert "root:" not in answer.text


def test_a_folder_with_a_link_out_of_the_root_is_refused(client: httpx.Client, beir_folder: Path):
    (beir_folder / "qrels" / "dev.tsv").symlink_to("/etc/passwd")
    answer = create(client, "beir", path=str(beir_folder))
    assert answer.status_code == 422
    assert "dev.tsv is a link that leaves the configured roots" in answer.json()["detail"]


# By upload


@pytest.mark.parametrize(
    "pack",
    [bytes, gzip.compress, lambda raw: zstandard.ZstdCompressor().compress(raw)],
    ids=["plain", "gz", "zst"],
)
def test_an_upload_is_checked_hashed_and_kept(client: httpx.Client, settings, pack):
    created = create(client, "training")
    assert created.status_code == 201
    assert created.json()["state"] == "awaiting_content"
    content = pack(ROWS)
    answer = upload(client, content)
    assert answer.status_code == 200
    dataset = answer.json()
    assert dataset["state"] == "ready"
    assert dataset["stats"] == {"rows": 20, "positives": 20, "negatives": 40}
    assert (settings.data / dataset["path"]).read_bytes() == content
    assert left_over(settings.data) == [dataset["id"]]
    assert client.get("/v1/datasets/mine").json() == dataset


def test_a_chunked_upload(client: httpx.Client):
    create(client, "training")
    answer = upload(client, (ROWS[start : start + 7] for start in range(0, len(ROWS), 7)))
    assert answer.json()["stats"]["rows"] == 20


def test_a_broken_upload_is_refused_and_can_be_repeated(client: httpx.Client, settings):
    create(client, "training")
    lines = ROWS.splitlines(keepends=True)
    lines[16] = b'{"query": "no positives"}\n'
    answer = upload(client, b"".join(lines))
    assert answer.status_code == 422
    (fault,) = answer.json()["errors"]
    assert (fault["file"], fault["line"], fault["field"]) == ("content", 17, "positive_passages")
    assert str(settings.data) not in answer.text
    assert left_over(settings.data) == []
    assert upload(client, ROWS).status_code == 200


def test_content_comes_once(client: httpx.Client):
    create(client, "ranklist")
    assert upload(client, b"q1 d1 1.5\nq1 d2 1\n").json()["stats"] == {"queries": 1, "rows": 2}
    answer = upload(client, b"q1 d1 1.5\n")
    assert answer.status_code == 409
    assert answer.json()["detail"] == "dataset 'mine' has its content already; register another"


def test_of_concurrent_uploads_one_wins(client: httpx.Client, settings):
    dataset = create(client, "training").json()
    statuses: list[int] = []

    def send() -> None:
        statuses.append(upload(client, ROWS).status_code)

    threads = [threading.Thread(target=send) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200, 409, 409, 409, 409]
    assert left_over(settings.data) == [dataset["id"]]


def test_an_upload_over_the_limit_is_refused(client: httpx.Client, settings):
    create(client, "training")
    answer = upload(client, b"x" * (settings.max_upload_bytes + 1))
    assert answer.status_code == 413
    answer = upload(client, (b"x" * 2**20 for _ in range(6)))
    assert answer.status_code == 413
    assert left_over(settings.data) == []
    assert upload(client, b"").status_code == 422


def test_a_client_that_goes_away_leaves_nothing(client: httpx.Client, settings):
    create(client, "training")

    def broken() -> Iterator[bytes]:
        yield ROWS
        raise ConnectionResetError

    with pytest.raises(ConnectionResetError):
        upload(client, broken())
    assert upload(client, ROWS).status_code == 200
    for _ in range(100):
        if left_over(settings.data) == [client.get("/v1/datasets/mine").json()["id"]]:
            break
        threading.Event().wait(0.05)
    else:
        raise AssertionError(left_over(settings.data))


@pytest.mark.parametrize("prefix", ["", "scifact/"])
def test_a_beir_archive_is_unpacked(client: httpx.Client, settings, tmp_path: Path, prefix: str):
    create(client, "beir")
    dataset = upload(client, beir_zip(tmp_path, prefix)).json()
    assert dataset["stats"] == {"documents": 2, "queries": 1, "splits": {"test": 1}}
    folder = settings.data / dataset["path"]
    assert sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    ) == [
        "corpus.jsonl",
        "qrels/test.tsv",
        "queries.jsonl",
    ]
    assert left_over(settings.data) == [dataset["id"]]


def archive_of(*members: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, content in members:
            archive.writestr(member, content)
    return held.getvalue()


def link(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name)
    member.external_attr = 0o120777 << 16
    return member


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (archive_of(("../corpus.jsonl", b"{}")), "leaves its folder"),
        (archive_of(("a/../../corpus.jsonl", b"{}")), "leaves its folder"),
        (archive_of(("/etc/cron.d/x", b"{}")), "leaves its folder"),
        (archive_of(("a\\..\\corpus.jsonl", b"{}")), "leaves its folder"),
        (archive_of(("C:/corpus.jsonl", b"{}")), "leaves its folder"),
        (archive_of((link("corpus.jsonl"), b"/etc/passwd")), "is a link"),
        (archive_of(("readme.txt", b"")), "holds no corpus.jsonl"),
        (archive_of(("a/corpus.jsonl", b"{}"), ("b/corpus.jsonl", b"{}")), "more than one corpus"),
        (archive_of(("corpus.jsonl", b"{}")), "expected queries.jsonl"),
        (archive_of(*((f"f{number}", b"") for number in range(10_001))), "10001 members"),
        (b"PK\x03\x04 broken", "not a .zip"),
        (ROWS, "not a .zip"),
        (beir_zip, "over the limit"),
    ],
)
def test_an_archive_that_is_not_a_beir_folder_is_refused(
    client: httpx.Client, settings, tmp_path: Path, content, message: str
):
    if content is beir_zip:
        content = archive_of(("corpus.jsonl", b" " * (settings.max_upload_bytes + 1)))
    create(client, "beir")
    answer = upload(client, content)
    assert answer.status_code == (413 if message == "over the limit" else 422)
    assert message in answer.json()["detail"]
    assert str(settings.data) not in answer.text
    assert left_over(settings.data) == []
    assert not (settings.data / "corpus.jsonl").exists()


def test_an_encrypted_archive_is_refused(client: httpx.Client, tmp_path: Path):
    content = bytearray(beir_zip(tmp_path))
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = -1
        while (place := content.find(mark, place + 1)) >= 0:
            content[place + offset] |= 1
    create(client, "beir")
    answer = upload(client, bytes(content))
    assert answer.status_code == 422
    assert "encrypted" in answer.json()["detail"]


def test_parts_that_a_crash_left_are_removed_once_they_are_old(tmp_path: Path):
    old, young = (tmp_path / "datasets" / f".upload-ds_{name}" for name in ("old", "young"))
    for part in (old, young):
        part.mkdir(parents=True)
        (part / "received").write_bytes(b"x")
    os.utime(old, (0, 0))
    remove_stale_parts(tmp_path)
    assert not old.exists()
    assert young.exists()
    remove_stale_parts(tmp_path / "nothing here")
