"""Mistakes in a model's folder and in training data, found before a rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tevatron.core.contracts.checkpoint import (
    AnswerTokenIds,
    CheckpointContract,
    Probe,
    TemplateContract,
    write_contract,
)
from tevatron.core.contracts.tokenizers import tokenizer_sha256
from tevatron.core.contracts.train import Head
from tevatron.core.errors import JobError
from tevatron.trainer.checks import check_dataset, check_model

ROW = {
    "query_id": "q1",
    "query": "what is a reranker",
    "positive_passages": [{"docid": "d1", "title": "", "text": "it orders passages"}],
    "negative_passages": [{"docid": "d2", "title": "", "text": "a kind of bread"}],
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def assert_refused(error: pytest.ExceptionInfo[JobError], reason: str) -> str:
    assert (error.value.reason, error.value.phase) == (reason, "preparing")
    return str(error.value)


def test_a_whole_model_folder_passes(model: Path) -> None:
    check_model(model)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("config.json", "has no config.json"),
        ("tokenizer.json", "has no tokenizer: expected tokenizer.json"),
        ("model.safetensors", r"has no \*.safetensors weights"),
    ],
)
def test_a_lost_file_is_named(model: Path, lost: str, message: str) -> None:
    (model / lost).unlink()
    with pytest.raises(JobError, match=message) as error:
        check_model(model)
    assert str(model) in assert_refused(error, "model_error")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="nowhere is not there") as error:
        check_model(tmp_path / "nowhere")
    assert_refused(error, "model_error")


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_configuration_that_is_none_is_refused(model: Path, content: str) -> None:
    (model / "config.json").write_text(content)
    with pytest.raises(JobError, match=r"config\.json") as error:
        check_model(model)
    assert_refused(error, "model_error")


def test_pickled_weights_alone_are_refused_by_name(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    with pytest.raises(JobError, match=r"weights, only pytorch_model\.bin"):
        check_model(model)


def test_a_lost_shard_is_named(model: Path) -> None:
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model / "model-1.safetensors").write_bytes(b"")
    with pytest.raises(JobError, match=r"lacks 1 of 2 weight files: model-2\.safetensors"):
        check_model(model)
    (model / "model-2.safetensors").write_bytes(b"")
    check_model(model)


def test_an_index_without_a_map_is_refused(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(JobError, match=r"index\.json: field 'weight_map'"):
        check_model(model)


def test_good_data_is_counted_and_looked_at_now_and_then(tmp_path: Path) -> None:
    looks: list[int] = []
    path = write(tmp_path / "train.jsonl", *[ROW] * 2500)
    assert check_dataset(path, look=lambda: looks.append(1)) == 2500
    assert len(looks) == 2


def test_a_broken_line_is_named_with_its_number(tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", *[ROW] * 20)
    lines = path.read_text().splitlines()
    lines[16] = '{"query_id": "q17", "query": '
    path.write_text("\n".join(lines))
    with pytest.raises(JobError, match=r"train\.jsonl:17: not JSON") as error:
        check_dataset(path, look=lambda: None)
    assert_refused(error, "data_error")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**ROW, "positive_passages": []}, r":1: field 'positive_passages'"),
        ({**ROW, "query": 7}, r":1: field 'query'"),
        (
            {**ROW, "negative_passages": [{"docid": "d", "text": ""}]},
            r":1: field 'negative_passages\[0\]\.text'",
        ),
        (
            {"query": "q", "passages": [{"text": "a"}], "scores": [float("nan")]},
            r":1: field 'scores\[0\]'",
        ),
    ],
)
def test_a_broken_row_is_refused_with_line_and_field(
    tmp_path: Path, row: object, message: str
) -> None:
    with pytest.raises(JobError, match=message) as error:
        check_dataset(write(tmp_path / "train.jsonl", row), look=lambda: None)
    assert_refused(error, "data_error")


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_data_without_rows_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content)
    with pytest.raises(JobError, match="expected at least one row, got none") as error:
        check_dataset(path, look=lambda: None)
    assert_refused(error, "data_error")


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"gone\.jsonl") as error:
        check_dataset(tmp_path / "gone.jsonl", look=lambda: None)
    assert_refused(error, "data_error")


def test_a_stop_request_ends_the_reading(tmp_path: Path) -> None:
    class AskedToStopError(Exception):
        pass

    def stop() -> None:
        raise AskedToStopError

    path = write(tmp_path / "train.jsonl", *[ROW] * 1000)
    with pytest.raises(AskedToStopError):
        check_dataset(path, look=stop)


def test_a_contract_of_another_tokenizer_is_named(model: Path) -> None:
    contract = CheckpointContract(
        template=TemplateContract(
            name="tevatron",
            version=1,
            query_prefix="query:",
            passage_prefix="passage:",
            text="",
            yes=" yes",
            no=" no",
        ),
        answer_ids=AnswerTokenIds(yes=1, no=2),
        head=Head.YES_NO,
        max_length=512,
        dtype="float32",
        base_model="base",
        base_model_sha256=None,
        tokenizer_sha256=tokenizer_sha256(model),
        training_data_sha256=None,
        arguments=None,
        code_version="1",
        probes=[Probe(query="q", title="", text="t", token_ids=[1], score=0.5)],
    )
    write_contract(model, contract)
    check_model(model)
    (model / "tokenizer.json").write_text('{"model": {"type": "WordPiece"}}')
    with pytest.raises(JobError, match=r"tokenizer of .* differs") as error:
        check_model(model)
    assert_refused(error, "contract_mismatch")
