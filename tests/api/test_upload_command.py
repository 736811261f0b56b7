"""`tevatron datasets add --upload` against the real API: what lies on the client's machine arrives whole."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from tests.api.conftest import training_row, write_beir
from typer.testing import CliRunner

from tevatron.core.cli.client import Client
from tevatron.core.cli.main import app as command
from tevatron.core.cli.uploading import content_of
from tevatron.core.contracts.resources import DatasetKind, DatasetRequest
from tevatron.core.errors import ConfigError


@pytest.fixture
def run(server_url: str):
    def run(*words: str):
        return CliRunner().invoke(
            command,
            ["datasets", "add", *words, "--upload", "--json"],
            env={"TEVATRON_URL": server_url},
        )

    return run


def test_a_beir_folder_is_sent_as_one_archive(run, settings, tmp_path: Path):
    folder = tmp_path / "elsewhere" / "sample"
    folder.mkdir(parents=True)
    write_beir(folder)
    (folder / "notes.txt").write_text("stays here")
    answer = run("sample", str(folder), "--kind", "beir")
    assert answer.exit_code == 0, answer.output
    dataset = json.loads(answer.stdout)
    assert dataset["state"] == "ready"
    stored = settings.data / dataset["path"]
    names = [str(path.relative_to(stored)) for path in stored.rglob("*") if path.is_file()]
    assert sorted(names) == ["corpus.jsonl", "qrels/test.tsv", "queries.jsonl"]
    assert (stored / "corpus.jsonl").read_bytes() == (folder / "corpus.jsonl").read_bytes()


def test_a_file_is_sent_as_it_is_and_a_broken_one_can_be_sent_again(run, settings, tmp_path: Path):
    file = tmp_path / "rows.jsonl"
    file.write_text("no row\n")
    assert run("rows", str(file), "--kind", "training").exit_code == 1
    file.write_text(json.dumps(training_row(1)) + "\n")
    answer = run("rows", str(file), "--kind", "training")
    assert answer.exit_code == 0, answer.output
    stored = settings.data / json.loads(answer.stdout)["path"]
    assert stored.read_bytes() == file.read_bytes()


def test_a_dataset_that_is_whole_takes_no_other_content(
    server_url: str, client: httpx.Client, tmp_path: Path
):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(training_row(1)) + "\n")
    request = DatasetRequest(name="rows", kind=DatasetKind.TRAINING)
    with Client(server_url) as sender:
        sender.upload_dataset(request, file)
        with pytest.raises(Exception, match="rows") as refused:
            sender.upload_dataset(request, file)
    assert refused.value.status_code == 409


@pytest.mark.parametrize("kind", [DatasetKind.TRAINING, DatasetKind.BEIR])
def test_nothing_to_send_is_an_error(tmp_path: Path, kind: DatasetKind):
    path = tmp_path / ("absent.jsonl" if kind is DatasetKind.TRAINING else "")
    with pytest.raises(ConfigError, match="expected a"), content_of(path, kind):
        pass
