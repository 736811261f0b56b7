"""States are written beside the training: what is saved is the step's, whatever comes after, and a kill costs one state."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from tests.megatron.ranks import on_ranks
from tests.megatron.runs import (
    Layout,
    arguments,
    events,
    losses,
    model_folder,
    run,
    whole_run,
    write_data,
)

from tevatron.core.contracts.train import TrainArguments
from tevatron.trainer.program.states import list_states

WRITE = FileSystemWriterAsync.write_preloaded_data_multithread


def slow_run(folder: Path, data: Path, out: Path, options: TrainArguments) -> None:
    """Train while a state's writing lasts longer than the steps after it."""

    def slowly(*given: object) -> None:
        time.sleep(1.5)
        WRITE(*given)

    FileSystemWriterAsync.write_preloaded_data_multithread = staticmethod(slowly)
    whole_run(folder, data, out, options)


def killed_run(folder: Path, data: Path, out: Path, options: TrainArguments) -> None:
    """Kill this rank in the middle of writing its second state."""
    number = 0

    def fatally(*given: object) -> None:
        nonlocal number
        number += 1
        if number == 2:
            next(iter((out / "states").glob("*.tmp"))).joinpath("half").write_bytes(b"\0" * 100)
            os.kill(os.getpid(), signal.SIGKILL)
        WRITE(*given)

    FileSystemWriterAsync.write_preloaded_data_multithread = staticmethod(fatally)
    whole_run(folder, data, out, options)


def stopped_run(folder: Path, data: Path, out: Path, options: TrainArguments) -> None:
    """Ask one rank to stop once a step is done."""

    def ask() -> None:
        while not (out / "events.jsonl").exists() or not losses(out):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    if os.environ["RANK"] == "1":
        threading.Thread(target=ask, daemon=True).start()
    whole_run(folder, data, out, options)


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, Path, Path]:
    out = tmp_path / "run"
    out.mkdir()
    return model_folder(tmp_path / "llama", "llama"), write_data(tmp_path / "data.jsonl"), out


def steps_saved(out: Path) -> list[int]:
    return [state.step for state in list_states(out)]


SHARDED = {"megatron": {"use_megatron_fsdp": True}}


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ((2, 2, 1, 1), {}),
        pytest.param((2, 2, 1, 1), {"use_lora": True}, marks=pytest.mark.full),
        pytest.param((2, 1, 1, 1), SHARDED, marks=pytest.mark.full),
    ],
)
def test_a_state_is_the_steps_though_training_goes_on_while_it_is_written(
    tmp_path: Path, place: tuple[Path, Path, Path], layout: Layout, changes: dict[str, object]
):
    out = place[2]
    on_ranks(2, slow_run, *place, arguments(layout, **changes))
    unbroken = losses(out)
    order = [
        (kind, line["step"]) for kind in ("metrics", "state_saved") for line in events(out, kind)
    ]
    assert ("state_saved", 3) in order
    assert steps_saved(out) == [3, 6]
    shutil.rmtree(out / "states" / "step-6")
    (out / "events.jsonl").unlink()
    run(tmp_path, "llama", layout, **changes)
    assert losses(out) == pytest.approx(unbroken[3:], abs=1e-5)


def test_a_kill_while_a_state_is_written_leaves_the_one_before(
    tmp_path: Path, place: tuple[Path, Path, Path]
):
    out = place[2]
    options = arguments((2, 2, 1, 1), save_steps=2)
    with pytest.raises(AssertionError, match="ended with -9"):
        on_ranks(2, killed_run, *place, options)
    assert steps_saved(out) == [2]
    assert (out / "states" / "step-4.tmp").is_dir()
    (out / "events.jsonl").unlink()
    run(tmp_path, "llama", (2, 2, 1, 1), save_steps=2)
    assert steps_saved(out) == [4, 6]
    resumed = losses(out)
    shutil.rmtree(out)
    run(tmp_path, "llama", (2, 2, 1, 1), save_steps=2)
    assert resumed == pytest.approx(losses(out)[2:], abs=1e-5)


@pytest.mark.parametrize("changes", [{}, SHARDED])
def test_a_stop_saves_the_step_that_it_ends_with(
    place: tuple[Path, Path, Path], changes: dict[str, object]
):
    out = place[2]
    options = arguments((2, 1, 1, 1), max_steps=200, save_steps=1000, **changes)
    on_ranks(2, stopped_run, *place, options)
    (stopped,) = events(out, "stopped")
    assert steps_saved(out) == [stopped["step"]]
    assert events(out, "state_saved") == [stopped]
    assert not (out / "export").exists()
    assert len(losses(out)) == stopped["step"] < 200
