"""The run folder: what is whole, and what is cleared away."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from tevatron.core.contracts.checkpoint import write_contract
from tevatron.trainer.run_folder import RunFolder, is_checkpoint, sync_tree


class Config(BaseModel):
    number: int


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def test_prepare_writes_the_input_and_clears_what_the_last_attempt_left(run: RunFolder) -> None:
    run.prepare(Config(number=1))
    (run.path / "states" / "step-4").mkdir(parents=True)
    (run.path / "states" / "step-8.tmp").mkdir()
    (run.path / "states" / "step-8.tmp" / "model.safetensors").write_bytes(b"x")
    (run.path / "export.tmp").mkdir()
    (run.path / "events.jsonl").write_text("{}\n")
    run.cancel.touch()
    run.prepare(Config(number=2))
    assert run.config.read_text() == '{\n  "number": 2\n}\n'
    assert sorted(path.name for path in run.path.iterdir()) == [
        "config.json",
        "events.jsonl",
        "states",
    ]
    assert [path.name for path in (run.path / "states").iterdir()] == ["step-4"]


def test_a_whole_export_is_kept(run: RunFolder) -> None:
    run.prepare(Config(number=1))
    run.export.mkdir()
    run.remove_half_done()
    assert run.export.is_dir()


def test_saved_steps_are_the_complete_ones_in_order(run: RunFolder) -> None:
    assert run.saved_steps() == []
    for name in ("step-100", "step-20", "step-120.tmp", "other"):
        (run.path / "states" / name).mkdir(parents=True)
    (run.path / "states" / "step-7").touch()
    assert run.saved_steps() == [20, 100]


def test_log_has_the_attempts_number(run: RunFolder) -> None:
    assert run.log(3).name == "attempt-3.log"


def test_a_checkpoint_needs_weights_and_a_readable_contract(tmp_path: Path, contract) -> None:
    folder = tmp_path / "export"
    assert is_checkpoint(folder) is False
    folder.mkdir()
    write_contract(folder, contract)
    assert is_checkpoint(folder) is False
    (folder / "model.safetensors").write_bytes(b"x")
    assert is_checkpoint(folder) is True
    (folder / "reranker.json").write_text("{")
    assert is_checkpoint(folder) is False


def test_sync_tree_reads_every_folder(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("x")
    sync_tree(tmp_path)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError):
        sync_tree(tmp_path)


def test_an_adopted_attempt_has_the_log_that_its_ranks_go_on_writing(run: RunFolder) -> None:
    run.path.mkdir()
    run.share_log(1)
    assert list(run.path.iterdir()) == []
    run.log(1).write_text("first\n")
    run.share_log(3)
    with run.log(1).open("a") as log:
        log.write("second\n")
    assert run.log(3).read_text() == "first\nsecond\n"
