"""Whole runs with held-out rows: nothing of the training changes, the best step is kept, published, and survives a stop."""

import json
import math
import os
import shutil
import signal
import time

import pytest
from tests.trainer.program.training import (
    WORDS,
    evaluations,
    losses,
    make_run,
    of_type,
    read_events,
    run_export,
    run_training,
    write_dataset,
)

from tevatron.core.contracts.checkpoint import read_contract, renderer
from tevatron.core.errors import ConfigError, FormatError
from tevatron.core.nn.loading import load_model, load_tokenizer, score_head
from tevatron.core.nn.probing import PromptScorer
from tevatron.core.prompts import Pair
from tevatron.trainer.program.backends.hf.trainer import RerankTrainer
from tevatron.trainer.program.states import list_states

DROPOUT = {"use_lora": True, "lora_r": 4, "lora_dropout": 0.3}


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """Rows as those that are trained on, and some that say the opposite: who is too sure of the first loses by them."""
    path = tmp_path_factory.mktemp("held") / "held.jsonl"
    right = {"text": "beta is 4 beta is 4"}
    wrong = [{"title": "A-b", "text": f"other thing {place}"} for place in range(4)]
    with path.open("w") as stream:
        for number in range(8):
            query = {"query_id": str(number), "query": f"what is {WORDS[number % 5]}"}
            good, bad = (wrong[:1], [right, *wrong[1:]]) if number < 3 else ([right], wrong)
            row = {**query, "positive_passages": good, "negative_passages": bad}
            stream.write(json.dumps(row) + "\n")
    return path


LONG = {
    "num_train_epochs": 4,
    "eval_steps": 2,
    "learning_rate": 3e-3,
    "load_best_model_at_end": True,
}


@pytest.fixture(scope="module")
def overfit(llama, dataset, held_out, tmp_path_factory):
    """Sixteen steps, evaluated after every second; its folder and events."""
    folder = tmp_path_factory.mktemp("overfit")
    return folder, run_training(make_run(llama, dataset, folder, validation=held_out, **LONG))


def exported_loss(folder, held_out, group_size=4):
    """Return the mean held-out loss of what a run published, by transformers and arithmetic of its own."""
    export = folder / "export"
    contract = read_contract(export)
    prompts = renderer(contract, load_tokenizer(export))
    ids = prompts.answer_ids
    model = load_model(export, contract.head, dtype="float32", device="cpu")
    scorer = PromptScorer(model, score_head(contract.head, yes=ids.yes, no=ids.no))
    found = []
    for line in held_out.read_text().splitlines():
        row = json.loads(line)
        passages = [*row["positive_passages"], *row["negative_passages"][: group_size - 1]]
        pairs = [
            Pair(query=row["query"], title=one.get("title", ""), text=one["text"])
            for one in passages
        ]
        scores = scorer.score([prompts.render(pair).ids for pair in pairs])
        found.append(-scores[0] + math.log(sum(math.exp(score) for score in scores)))
    return sum(found) / len(found)


@pytest.mark.parametrize("changes", [{}, DROPOUT, {"gradient_checkpointing": True}])
def test_validation_changes_nothing_of_the_training(llama, dataset, tmp_path, changes):
    without = run_training(make_run(llama, dataset, tmp_path / "without", **changes))
    validated = make_run(
        llama, dataset, tmp_path / "with", validation=dataset, eval_steps=3, **changes
    )
    events = run_training(validated)
    assert losses(events) == losses(without)
    assert [data["step"] for data in evaluations(events)] == [3, 6, 8]
    assert of_type(events, "exported") == [{"step": 8}]


@pytest.mark.parametrize("changes", [{"packing_max_tokens": 100}, {"packing": False}])
def test_packing_changes_no_number(overfit, llama, dataset, held_out, tmp_path, changes):
    run = make_run(llama, dataset, tmp_path, validation=held_out, **{**LONG, **changes})
    before, now = evaluations(overfit[1])[:2], evaluations(run_training(run))[:2]
    for name in ("eval_loss", "eval_ndcg@10"):
        assert [data[name] for data in now] == pytest.approx(
            [data[name] for data in before], abs=1e-5
        )


def test_the_best_step_of_a_run_that_overfits_is_published(overfit, held_out):
    folder, events = overfit
    found = {data["step"]: data["eval_loss"] for data in evaluations(events)}
    assert list(found) == [2, 4, 6, 8, 10, 12, 14, 16]
    best = min(found, key=found.get)
    assert 2 <= best < 16
    assert found[16] > found[best] + 0.05
    assert losses(events)[-1] < losses(events)[best - 1]
    assert of_type(events, "exported") == [{"step": best}]
    assert exported_loss(folder, held_out) == pytest.approx(found[best], abs=1e-4)
    # The two newest are kept beside it.
    assert {best, 16} < {state.step for state in list_states(folder)}
    assert len(list_states(folder)) == 3


def test_an_export_without_a_step_is_of_the_best_and_says_so(overfit, held_out, tmp_path):
    folder, events = overfit
    (exported,) = of_type(events, "exported")
    best = exported["step"]
    assert run_export(tmp_path, folder) == 0
    said = read_events(tmp_path)
    assert of_type(said, "exported") == [{"step": best}]
    message = f"exporting the best state, of step {best}; the newest is of step 16"
    assert of_type(said, "log") == [{"level": "info", "message": message}]
    found = {data["step"]: data["eval_loss"] for data in evaluations(events)}
    assert exported_loss(tmp_path, held_out) == pytest.approx(found[best], abs=1e-4)


def test_an_export_of_a_step_is_of_that_step(overfit, tmp_path):
    assert run_export(tmp_path, overfit[0], step=16) == 0
    assert of_type(read_events(tmp_path), "exported") == [{"step": 16}]


def test_an_export_whose_best_state_is_gone_says_what_is_there(overfit, tmp_path):
    folder, events = overfit
    (exported,) = of_type(events, "exported")
    there = tmp_path / "run"
    shutil.copytree(folder, there)
    shutil.rmtree(there / "states" / f"step-{exported['step']}")
    assert run_export(tmp_path, there) == 1
    (failed,) = of_type(read_events(tmp_path), "failed")
    assert f"a saved state of step {exported['step']}; there are: 15, 16" in failed["message"]


def test_without_keeping_the_best_the_last_step_is_published(llama, dataset, held_out, tmp_path):
    options = {**LONG, "max_steps": 3, "load_best_model_at_end": False}
    events = run_training(make_run(llama, dataset, tmp_path, validation=held_out, **options))
    assert of_type(events, "exported") == [{"step": 3}]
    last = evaluations(events)[-1]
    assert last["step"] == 3
    assert exported_loss(tmp_path, held_out) == pytest.approx(last["eval_loss"], abs=1e-4)


def at_step(monkeypatch, step, action):
    own = RerankTrainer.training_step

    def with_action(self, *args, **kwargs):
        if self.state.global_step == step - 1:
            action()
        return own(self, *args, **kwargs)

    monkeypatch.setattr(RerankTrainer, "training_step", with_action)


class Killed(BaseException):
    """What ends a run as a kill does: nothing more is written."""


def kill():
    raise Killed


def test_a_run_that_is_stopped_and_killed_decides_as_the_unbroken_one(
    overfit, llama, dataset, held_out, tmp_path, monkeypatch
):
    _, unbroken = overfit
    (exported,) = of_type(unbroken, "exported")
    best = exported["step"]
    patience = {**LONG, "early_stopping_patience": 2}
    run = make_run(llama, dataset, tmp_path, validation=held_out, **patience)
    with monkeypatch.context() as patched:
        # At a step that is evaluated, and in the middle of those that are no better.
        at_step(patched, best + 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert of_type(run_training(run), "stopped") == [{"step": best + 2}]
    with monkeypatch.context() as patched:
        at_step(patched, best + 4, kill)
        with pytest.raises(Killed):
            run_training(run)
    events = run_training(run)
    assert of_type(events, "exported") == [exported]
    by_step = {data["step"]: data["eval_loss"] for data in evaluations(events)}
    expected = {data["step"]: data["eval_loss"] for data in evaluations(unbroken)}
    assert by_step == pytest.approx(
        {step: loss for step, loss in expected.items() if step <= best + 4}, abs=1e-6
    )
    # Begun again after its early end, it is only published again.
    again = run_training(run)
    assert of_type(again, "exported") == [exported, exported]
    assert len(losses(again)) == len(losses(events))
    assert list_states(tmp_path)[-1].step == best + 4


def test_a_state_whose_best_is_gone_is_refused(overfit, llama, dataset, held_out, tmp_path):
    folder, events = overfit
    (exported,) = of_type(events, "exported")
    there = tmp_path / "run"
    shutil.copytree(folder, there)
    shutil.rmtree(there / "states" / f"step-{exported['step']}")
    run = make_run(llama, dataset, there, validation=held_out, **LONG)
    with pytest.raises(
        ConfigError, match=rf"step {exported['step']} is the best so far, whose state"
    ):
        run_training(run)


def test_other_held_out_rows_are_another_run(llama, dataset, held_out, tmp_path):
    options = {**LONG, "max_steps": 1}
    run_training(make_run(llama, dataset, tmp_path, validation=held_out, **options))
    other = write_dataset(tmp_path / "other.jsonl", 3)
    with pytest.raises(ConfigError, match="validation_sha256"):
        run_training(make_run(llama, dataset, tmp_path, validation=other, **options))


def test_a_broken_held_out_row_is_named_before_the_model_loads(llama, dataset, tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text('{"query": "who", "positive_passages": []}\n')
    run = make_run(llama, dataset, tmp_path / "run", validation=path, eval_steps=1)
    with pytest.raises(FormatError, match=r"held\.jsonl:1"):
        run_training(run)


def test_a_state_is_saved_and_the_run_finished_when_a_file_asks_for_it(
    llama, dataset, held_out, tmp_path, monkeypatch
):
    options = {**LONG, "eval_steps": 100, "load_best_model_at_end": False, "save_steps": 100}
    run = make_run(llama, dataset, tmp_path, validation=held_out, **options)
    with monkeypatch.context() as patched:
        at_step(patched, 2, (tmp_path / "save").touch)
        at_step(patched, 5, (tmp_path / "finish").touch)
        events = run_training(run)
    assert [data["step"] for data in of_type(events, "state_saved")] == [2, 5]
    assert of_type(events, "exported") == [{"step": 5}]
    # A last step is evaluated, whichever it turns out to be.
    (last,) = evaluations(events)
    assert last["step"] == 5
    assert exported_loss(tmp_path, held_out) == pytest.approx(last["eval_loss"], abs=1e-4)
    assert not (tmp_path / "save").exists()
    assert not (tmp_path / "finish").exists()
    again = run_training(run)
    assert len(losses(again)) == 5
    assert of_type(again, "exported") == [{"step": 5}] * 2


def test_validation_takes_nothing_from_the_speed_that_is_reported(
    llama, dataset, tmp_path, monkeypatch
):
    own = RerankTrainer._score

    def slowly(self, prompts):
        time.sleep(5)
        return own(self, prompts)

    monkeypatch.setattr(RerankTrainer, "_score", slowly)
    options = {"eval_steps": 1, "max_steps": 2}
    events = run_training(make_run(llama, dataset, tmp_path, validation=dataset, **options))
    speed = next(data for data in of_type(events, "metrics")[2:] if "loss" in data)
    # Sixteen pairs in five seconds and more would be under four a second.
    assert speed["pairs_per_s"] > 5
