"""Held-out rows with Megatron: the numbers of any layout and of the hf backend, and the best step is the one published."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from tests.megatron.ranks import on_ranks
from tests.megatron.runs import (
    Layout,
    arguments,
    events,
    largest_difference,
    losses,
    model_folder,
    whole_run,
    write_data,
)

from tevatron.core.contracts.megatron import MegatronArguments
from tevatron.core.contracts.run import TrainRun
from tevatron.core.contracts.train import TrainArguments
from tevatron.trainer.program.events import EventWriter
from tevatron.trainer.program.settings import RankEnvironment
from tevatron.trainer.program.states import list_states
from tevatron.trainer.program.train import train_with

FULL = pytest.mark.full
SHARDED = {"megatron": {"use_megatron_fsdp": True}}
NUMBERS = ("eval_loss", "eval_ndcg@10")


class Place:
    """A model, data, and held-out rows of which a third say the opposite of what is trained."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = write_data(folder / "data.jsonl")
        self.held_out = folder / "held.jsonl"
        rows = [json.loads(line) for line in self.data.read_text().splitlines()]
        for row in rows[:4]:
            own, others = row["positive_passages"], row["negative_passages"]
            row["positive_passages"], row["negative_passages"] = others[:1], [*own, *others[1:]]
        self.held_out.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def model(self, kind: str) -> Path:
        path = self.folder / kind
        return path if path.is_dir() else model_folder(path, kind)

    def run(self, name: str, kind: str, layout: Layout, **changes: object) -> Path:
        out = self.folder / name
        out.mkdir(exist_ok=True)
        options = arguments(layout, **{"eval_steps": 2, **changes})
        on_ranks(layout[0], whole_run, self.model(kind), self.data, out, options, self.held_out)
        return out


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def evaluations(out: Path) -> list[dict[str, float]]:
    return [line for line in events(out, "metrics") if "eval_loss" in line]


def hf_run(folder: Path, data: Path, held_out: Path, out: Path) -> None:
    config = TrainRun(
        model_name_or_path=str(folder),
        dataset_path=str(data),
        validation_path=str(held_out),
        output_dir=out,
        base_model="base",
        arguments=arguments(eval_steps=2).model_copy(update={"megatron": MegatronArguments()}),
    )
    train_with(config, RankEnvironment.read(), EventWriter(out, rank=0))


@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [
        pytest.param("qwen3", (2, 1, 1, 1), {"per_device_train_batch_size": 2}, marks=FULL),
        pytest.param(
            "qwen3", (2, 1, 1, 1), {"per_device_train_batch_size": 2, **SHARDED}, marks=FULL
        ),
        ("qwen3", (2, 2, 1, 1), {"packing_max_tokens": 64}),
        pytest.param("qwen3", (2, 1, 2, 1), {"packing": False}, marks=FULL),
        ("qwen3_moe", (2, 1, 1, 2), {"per_device_train_batch_size": 2}),
    ],
)
def test_layouts_and_packing_change_no_number(
    place: Place, kind: str, layout: Layout, changes: dict[str, object]
):
    one = evaluations(place.run("one", kind, (1, 1, 1, 1)))
    other = evaluations(place.run("other", kind, layout, **changes))
    assert [line["step"] for line in other] == [2, 4, 6]
    for name in NUMBERS:
        assert [line[name] for line in other] == pytest.approx(
            [line[name] for line in one], abs=1e-5
        )


def test_both_backends_measure_alike(place: Place):
    ours = evaluations(place.run("ours", "qwen3", (1, 1, 1, 1)))
    other = place.folder / "other"
    other.mkdir()
    on_ranks(1, hf_run, place.model("qwen3"), place.data, place.held_out, other)
    for name in NUMBERS:
        assert [line[name] for line in evaluations(other)] == pytest.approx(
            [line[name] for line in ours], abs=1e-4
        )


def test_validation_changes_nothing_of_the_training(place: Place):
    """Dropout's random state among it."""
    options = {"use_lora": True, "lora_dropout": 0.3, "max_steps": 4}
    validated = place.run("validated", "llama", (2, 2, 1, 1), **options)
    without = place.folder / "without"
    without.mkdir()
    own = arguments((2, 2, 1, 1), **options)
    on_ranks(2, whole_run, place.model("llama"), place.data, without, own)
    assert losses(validated) == losses(without)
    assert len(evaluations(validated)) == 2


BEST = {"load_best_model_at_end": True, "learning_rate": 3e-3, "max_steps": 24}


@pytest.mark.parametrize("changes", [{}, pytest.param(SHARDED, marks=FULL)])
def test_the_best_step_is_kept_published_and_known_to_a_resumed_run(
    place: Place, changes: dict[str, object]
):
    options = {**BEST, **changes}
    out = place.run("run", "llama", (2, 1, 1, 1), **options)
    found = {line["step"]: line["eval_loss"] for line in evaluations(out)}
    best = min(found, key=found.__getitem__)
    assert best < 24
    assert found[24] > found[best] + 0.05
    assert events(out, "exported") == [{"step": best}]
    assert largest_difference(out / "export") < 1e-4
    assert [state.step for state in list_states(out)] == sorted({best, 21, 24})
    # As a kill after step 21 leaves it.
    shutil.rmtree(out / "states" / "step-24")
    (out / "events.jsonl").unlink()
    place.run("run", "llama", (2, 1, 1, 1), **options)
    assert events(out, "exported") == [{"step": best}]
    resumed = {line["step"]: line["eval_loss"] for line in evaluations(out)}
    assert resumed == pytest.approx({22: found[22], 24: found[24]}, abs=1e-5)


def test_patience_ends_the_run_and_what_is_begun_again_is_only_published(place: Place):
    options = {**BEST, "early_stopping_patience": 2}
    out = place.run("run", "llama", (2, 2, 1, 1), **options)
    found = {line["step"]: line["eval_loss"] for line in evaluations(out)}
    (exported,) = events(out, "exported")
    last = exported["step"] + 4
    assert max(found) == last < 24
    assert list_states(out)[-1].step == last
    (out / "events.jsonl").unlink()
    place.run("run", "llama", (2, 2, 1, 1), **options)
    assert events(out, "exported") == [exported]
    assert events(out, "metrics") == []


def asked_run(folder: Path, data: Path, out: Path, options: TrainArguments, held_out: Path) -> None:
    """Ask for a state once a step is done, and for the end once the state is there."""

    def ask() -> None:
        for name, kind in (("save", "metrics"), ("finish", "state_saved")):
            while not (out / "events.jsonl").exists() or not events(out, kind):
                time.sleep(0.01)
            (out / name).touch()

    if os.environ["RANK"] == "1":
        threading.Thread(target=ask, daemon=True).start()
    whole_run(folder, data, out, options, held_out)


def test_files_ask_two_ranks_for_a_state_and_for_the_end(place: Place):
    out = place.folder / "run"
    out.mkdir()
    options = arguments((2, 1, 1, 1), max_steps=400, save_steps=1000, eval_steps=1000)
    on_ranks(2, asked_run, place.model("llama"), place.data, out, options, place.held_out)
    saved, last = (line["step"] for line in events(out, "state_saved"))
    assert saved < last < 400
    assert [line["step"] for line in evaluations(out)] == [last]
    assert events(out, "exported") == [{"step": last}]
    assert events(out, "stopped") == []
    assert largest_difference(out / "export") < 1e-4
