"""Models and datasets of the hub: huggingface_hub itself against a small hub on this machine."""

import os
import subprocess
import sys

import pytest
from tests.support.hub import COMMIT, Hub, ask_at, pushes

from tevatron.core.errors import ConfigError, TooLargeError
from tevatron.core.hub import fetch_dataset, model_folder, send_model

pytestmark = pushes

NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    hub = Hub()
    ask_at(hub.url, monkeypatch, tmp_path / "cache")
    yield hub
    hub.close()


@pytest.fixture
def model(hub, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(name)
    (folder / "pytorch_model.bin").write_text("a pickle")
    (folder / "modeling.py").write_text("code")
    return hub.add("models", "owner/tiny", folder, tag="v1")


@pytest.fixture
def dataset(hub, tmp_path):
    folder = tmp_path / "dataset"
    (folder / "qrels").mkdir(parents=True)
    (folder / "corpus.jsonl").write_text('{"_id": "d"}\n')
    (folder / "qrels" / "test.tsv").write_text("q\td\t1\n")
    (folder / "README.md").write_text("words")
    return hub.add("datasets", "owner/rows", folder, tag="v1")


def test_a_folder_is_itself(tmp_path):
    assert model_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["no-such-folder", "/no/such", "./no/such", "a/b/c"])
def test_a_name_that_is_neither_folder_nor_hub_id_is_refused(name):
    with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
        model_folder(name)


@pytest.mark.parametrize("revision", ["v1", COMMIT, None])
def test_a_model_comes_without_pickles_and_code_once(hub, model, revision):
    for _ in range(2):
        folder = model_folder("owner/tiny", revision=revision)
        names = sorted(path.name for path in folder.iterdir())
        assert names == ["config.json", "model.safetensors", "tokenizer.json"]
        assert (folder / "config.json").read_text() == "config.json"
    assert sorted(hub.fetched) == names


def test_files_of_a_dataset_lie_in_the_folder_alone(dataset, tmp_path):
    folder = tmp_path / "new" / "folder"
    names = fetch_dataset(
        "owner/rows",
        revision="v1",
        files=["corpus.jsonl*", "qrels/*.tsv*"],
        folder=folder,
        max_bytes=100,
    )
    assert names == ["corpus.jsonl", "qrels/test.tsv"]
    assert (folder / "qrels" / "test.tsv").read_text() == "q\td\t1\n"
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    assert found == ["corpus.jsonl", "qrels", "qrels/test.tsv"]


def test_files_over_the_limit_are_not_fetched(hub, dataset, tmp_path):
    with pytest.raises(TooLargeError, match=r"'owner/rows': 19 bytes in 2 files, over .* of 18"):
        fetch_dataset(
            "owner/rows",
            revision="v1",
            files=["corpus.jsonl", "qrels/*"],
            folder=tmp_path / "new",
            max_bytes=18,
        )
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("hub_id", "revision", "files", "message"),
    [
        ("owner/none", "v1", ["corpus.jsonl"], "'owner/none' at revision 'v1' cannot be fetched"),
        ("owner/rows", "v2", ["corpus.jsonl"], "'owner/rows' at revision 'v2' cannot be fetched"),
        ("owner/rows", "v1", ["a.jsonl", "b"], "revision 'v1' has no file a.jsonl or b"),
    ],
)
def test_what_the_hub_has_not_is_named(dataset, tmp_path, hub_id, revision, files, message):
    with pytest.raises(ConfigError, match=message):
        fetch_dataset(
            hub_id, revision=revision, files=files, folder=tmp_path / "new", max_bytes=1000
        )


@pytest.mark.parametrize("revision", ["v1", COMMIT])
def test_a_hub_that_does_not_answer_is_an_error_that_names_the_thing(
    monkeypatch, tmp_path, revision
):
    ask_at(NOBODY, monkeypatch, tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with pytest.raises(ConfigError, match="model 'owner/tiny' is no folder here and cannot be"):
        model_folder("owner/tiny", revision=revision)
    with pytest.raises(ConfigError, match=r"dataset 'owner/rows' at revision .* cannot be fetched"):
        fetch_dataset(
            "owner/rows", revision=revision, files=["x"], folder=tmp_path / "new", max_bytes=1
        )


def test_without_the_hub_nothing_is_asked(hub, model, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="owner/tiny"):
        model_folder("owner/tiny", revision="v1")


def test_a_process_asks_the_hub_that_its_environment_names_with_its_token(hub, model, tmp_path):
    model.token = "hf_mine"
    program = "from tevatron.core.hub import model_folder; print(model_folder('owner/tiny', revision='v1'))"
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    environment.pop("HF_HUB_OFFLINE", None)
    for token, works in (("hf_another", False), ("hf_mine", True)):
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env={**environment, "HF_TOKEN": token},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode == 0) is works, ran.stderr
    assert ran.stdout.startswith(str(tmp_path / "home"))


STALE = ["*.safetensors", "*.safetensors.index.json"]


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "checkpoint"
    (folder / "more").mkdir(parents=True)
    files = {"model.safetensors": b"weights", "reranker.json": b"{}", "README.md": b"# Reranker"}
    for name, content in {**files, "more/notes.txt": b"n"}.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_checkpoint_is_pushed_to_a_new_private_repository_in_one_commit(hub, checkpoint):
    assert send_model(checkpoint, "owner/new", stale=STALE) == COMMIT
    pushed = hub.repositories["models", "owner/new"]
    assert (pushed.private, pushed.num_commits) == (True, 1)
    assert pushed.files == {
        "model.safetensors": b"weights",
        "reranker.json": b"{}",
        "README.md": b"# Reranker",
        "more/notes.txt": b"n",
    }
    # Weights went by LFS, the rest in the commit.
    assert [*hub.stored.values()] == [b"weights"]
    assert (model_folder("owner/new") / "model.safetensors").read_bytes() == b"weights"


def test_a_push_to_a_repository_that_is_there_replaces_its_weights_alone(hub, checkpoint, tmp_path):
    old = tmp_path / "old"
    old.mkdir()
    for name in ("model-00001-of-00002.safetensors", "model.safetensors", "LICENSE"):
        (old / name).write_text("old")
    there = hub.add("models", "owner/there", old)
    for _ in range(2):
        send_model(checkpoint, "owner/there", stale=STALE)
    names = {path.name for path in checkpoint.rglob("*") if path.is_file()} - {"notes.txt"}
    assert set(there.files) == {*names, "more/notes.txt", "LICENSE"}
    assert (there.files["LICENSE"], there.files["model.safetensors"]) == (b"old", b"weights")
    assert not there.private


def test_a_file_that_the_repository_ignores_is_an_error_that_names_it(hub, checkpoint, tmp_path):
    there = hub.add("models", "owner/there", tmp_path / "nothing")
    there.ignored = {"reranker.json"}
    with pytest.raises(
        ConfigError, match=r"'owner/there' .* not take reranker\.json: its \.gitignore"
    ):
        send_model(checkpoint, "owner/there", stale=STALE)


def test_without_the_right_to_write_nothing_is_pushed(hub, checkpoint, monkeypatch):
    hub.writer = "hf_writer"
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    with pytest.raises(ConfigError, match=r"'owner/new' cannot be pushed to the hub: .*401"):
        send_model(checkpoint, "owner/new", stale=STALE)
    assert (hub.repositories, hub.stored) == ({}, {})
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    assert send_model(checkpoint, "owner/new", stale=STALE) == COMMIT


def test_a_hub_that_does_not_answer_takes_no_push(checkpoint, monkeypatch, tmp_path):
    ask_at(NOBODY, monkeypatch, tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with pytest.raises(ConfigError, match="model 'owner/new' cannot be pushed to the hub"):
        send_model(checkpoint, "owner/new", stale=STALE)
