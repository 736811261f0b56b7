"""TensorBoard's own reader finds in the files what the events say, also where an attempt repeats steps."""

import logging

import numpy
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tests.trainer.program.training import make_run, of_type, run_training

from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.tensorboard import TensorBoard


def read(run_dir):
    """Steps and values by tag."""
    found = EventAccumulator(str(run_dir / "tensorboard"))
    found.Reload()
    return {
        tag: [(event.step, event.value) for event in found.Scalars(tag)]
        for tag in found.Tags()["scalars"]
    }


def test_a_run_with_held_out_rows_has_the_numbers_of_its_events(llama, dataset, tmp_path):
    run = make_run(llama, dataset, tmp_path, validation=dataset, eval_steps=2, max_steps=3)
    wanted = {}
    for data in of_type(run_training(run), "metrics"):
        for name in data.keys() - {"step"}:
            # The files hold single precision.
            wanted.setdefault(name, []).append((data["step"], float(numpy.float32(data[name]))))
    assert read(tmp_path) == wanted
    assert [step for step, _ in wanted["loss"]] == [1, 2, 3]
    assert [step for step, _ in wanted["eval_ndcg@10"]] == [2, 3]
    assert {"learning_rate", "grad_norm", "pairs_per_s", "memory_bytes", "eval_loss"} <= {*wanted}


def test_what_an_attempt_repeats_takes_the_place_of_what_was_there(tmp_path):
    for first, last, loss in ((0, 5, 1.0), (3, 6, 2.0)):
        board = TensorBoard(tmp_path, step=first)
        for step in range(first + 1, last + 1):
            board.take({"step": step, "loss": loss})
    assert read(tmp_path)["loss"] == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0)]


def test_a_record_that_a_kill_cut_off_hides_no_other(tmp_path):
    TensorBoard(tmp_path, step=0).take({"step": 1, "loss": 1.0})
    (file,) = (tmp_path / "tensorboard").iterdir()
    with file.open("ab") as stream:
        stream.write(b"\x40\x00\x00\x00\x00")
    TensorBoard(tmp_path, step=1).take({"step": 2, "loss": 2.0})
    assert read(tmp_path)["loss"] == [(1, 1.0), (2, 2.0)]


def test_a_number_that_is_none_is_left_out_as_in_the_event(tmp_path):
    events = EventWriter(tmp_path, rank=0)
    events.readers = [TensorBoard(tmp_path, step=0)]
    events.metrics({"step": 1, "loss": 0.5, "grad_norm": float("inf")})
    assert read(tmp_path) == {"loss": [(1, 0.5)]}


@pytest.mark.parametrize("step", [0, 4])
def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path, caplog, step):
    (tmp_path / "tensorboard").write_text("a file in its place")
    with caplog.at_level(logging.WARNING):
        TensorBoard(tmp_path, step=step).take({"step": 1, "loss": 1.0})
    assert "metrics cannot be written to" in caplog.text
