"""Whole runs on a tiny model: what is learnt, saved, resumed and published."""

import json
import math
import os
import shutil
import signal

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from tests.support.tiny_model import tiny_folder, tiny_tokenizer
from tests.trainer.program.training import (
    losses,
    make_run,
    of_type,
    read_events,
    run_training,
    write_dataset,
)
from transformers import AutoModelForCausalLM

from tevatron.core.contracts.checkpoint import read_contract, renderer
from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError, ContractError, FormatError, JobError
from tevatron.core.nn.loading import load_model, load_tokenizer, score_head
from tevatron.core.nn.probing import PromptScorer, prove
from tevatron.core.prompts import Pair
from tevatron.trainer.program.backends.hf.trainer import RerankTrainer
from tevatron.trainer.program.failures import NotFiniteError
from tevatron.trainer.program.states import list_states


@pytest.fixture(scope="module")
def plain(llama, dataset, tmp_path_factory):
    """An unbroken run: its folder and events."""
    folder = tmp_path_factory.mktemp("plain")
    return folder, run_training(make_run(llama, dataset, folder))


def stop_at(monkeypatch, step, action):
    """Do something in the middle of a step."""
    own = RerankTrainer.training_step

    def with_action(self, *args, **kwargs):
        if self.state.global_step == step - 1:
            action()
        return own(self, *args, **kwargs)

    monkeypatch.setattr(RerankTrainer, "training_step", with_action)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_loss_falls_and_everything_is_reported(plain):
    folder, events = plain
    phases = [data["phase"] for data in of_type(events, "phase")]
    assert [one for place, one in enumerate(phases) if place == 0 or phases[place - 1] != one][:3] == [
        "preparing", "loading", "training",
    ]  # fmt: skip
    assert phases[-1] == "exporting"
    assert "saving" in phases
    metrics = of_type(events, "metrics")
    assert [data["step"] for data in metrics] == list(range(1, 9))
    assert metrics[0]["loss"] > 1.2
    assert metrics[-1]["loss"] < 0.8 * metrics[0]["loss"]
    assert metrics[0]["learning_rate"] == 1e-3
    assert metrics[-1]["epoch"] == 2.0
    for name in ("grad_norm", "pairs_per_s", "tokens_per_s", "memory_bytes"):
        assert metrics[0][name] > 0
    assert of_type(events, "progress")[-1] == {"done": 8, "total": 8, "unit": "steps"}
    assert [data["step"] for data in of_type(events, "state_saved")] == [3, 6, 8]
    assert of_type(events, "exported") == [{"step": 8}]
    assert [state.step for state in list_states(folder)] == [6, 8]


def test_the_first_loss_is_the_cross_entropy_of_transformers_own_logits(llama, dataset, tmp_path):
    events = run_training(
        make_run(
            llama,
            dataset,
            tmp_path,
            train_group_size=3,
            max_steps=1,
            per_device_train_batch_size=13,
        )
    )
    model = AutoModelForCausalLM.from_pretrained(llama)
    tokenizer = tiny_tokenizer()
    from tevatron.core.prompts import Renderer, get_template
    from tevatron.trainer.program.data.rows import RowFile
    from tevatron.trainer.program.data.sampling import Sampling

    render = Renderer(get_template("tevatron"), tokenizer, max_length=96)
    rows, sampling = RowFile(tmp_path), Sampling(seed=42, group_size=3)
    expected = []
    for index in range(13):
        scores = []
        for one in sampling.group(rows[index], index=index, epoch=0):
            ids = render.render(Pair(query=rows[index].query, title=one.title, text=one.text)).ids
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            scores.append(logits[render.answer_ids.yes] - logits[render.answer_ids.no])
        expected.append(-torch.stack(scores).log_softmax(0)[0].item())
    assert losses(events) == [pytest.approx(sum(expected) / 13, abs=1e-5)]


@pytest.mark.parametrize(
    "changes",
    [
        {"packing": False},
        {"packing": False, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"packing_max_tokens": 300},
        {
            "packing_max_tokens": 16,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 4,
        },
        {"gradient_checkpointing": True},
    ],
)
def test_packing_micro_batches_and_checkpointing_change_nothing(
    plain, llama, dataset, tmp_path, changes
):
    events = run_training(make_run(llama, dataset, tmp_path, **changes))
    assert losses(events) == pytest.approx(losses(plain[1]), abs=1e-5)


def test_packed_and_padded_losses_agree_on_qwen3_too(qwen3, dataset, tmp_path):
    packed = run_training(make_run(qwen3, dataset, tmp_path / "a", max_steps=3))
    padded = run_training(make_run(qwen3, dataset, tmp_path / "b", max_steps=3, packing=False))
    assert losses(packed) == pytest.approx(losses(padded), abs=1e-5)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own import
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own look at inputs
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles with g++, which is absent")
def test_compiled_layers_change_nothing(plain, llama, dataset, tmp_path):
    changes = {"torch_compile": True, "gradient_checkpointing": True}
    events = run_training(make_run(llama, dataset, tmp_path, **changes))
    assert losses(events) == pytest.approx(losses(plain[1]), abs=1e-5)


DROPOUT = {"use_lora": True, "lora_r": 4, "lora_dropout": 0.3}


@pytest.mark.parametrize("changes", [{}, DROPOUT])
def test_a_resumed_run_gives_the_losses_of_an_unbroken_one(
    llama, dataset, tmp_path, monkeypatch, changes
):
    whole = losses(run_training(make_run(llama, dataset, tmp_path / "whole", **changes)))
    run = make_run(llama, dataset, tmp_path / "broken", **changes)
    with monkeypatch.context() as patched:
        stop_at(patched, 5, terminate)
        events = run_training(run)
    assert of_type(events, "stopped") == [{"step": 5}]
    assert of_type(events, "exported") == []
    assert not (run.output_dir / "export").exists()
    events = run_training(run)
    metrics = of_type(events, "metrics")
    assert [data["step"] for data in metrics] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert losses(events) == pytest.approx(whole, abs=1e-6)
    assert metrics[-1]["epoch"] == 2.0


def test_resuming_at_the_border_of_two_epochs(llama, dataset, tmp_path, monkeypatch, plain):
    run = make_run(llama, dataset, tmp_path)
    with monkeypatch.context() as patched:
        stop_at(patched, 4, terminate)
        run_training(run)
    assert losses(run_training(run)) == pytest.approx(losses(plain[1]), abs=1e-6)


def test_the_first_and_the_last_step_are_always_logged(llama, dataset, tmp_path):
    events = run_training(make_run(llama, dataset, tmp_path, logging_steps=100))
    assert [data["step"] for data in of_type(events, "metrics")] == [1, 8]


def test_a_mean_over_steps_does_not_notice_the_break(llama, dataset, tmp_path, monkeypatch):
    whole = run_training(make_run(llama, dataset, tmp_path / "whole", logging_steps=4))
    run = make_run(llama, dataset, tmp_path / "broken", logging_steps=4)
    with monkeypatch.context() as patched:
        stop_at(patched, 6, terminate)
        run_training(run)
    assert losses(run_training(run)) == pytest.approx(losses(whole), abs=1e-6)


def test_a_kill_in_the_middle_of_a_save_goes_on_from_the_state_before(
    llama, dataset, tmp_path, monkeypatch, plain
):
    class Killed(BaseException):
        pass

    def killed(tensors, folder):
        if folder.name.startswith("step-6"):
            (folder / "weights.safetensors").write_bytes(b"half")
            raise Killed
        own(tensors, folder)

    from tevatron.trainer.program.backends.hf import snapshot

    own = snapshot.save_weights
    run = make_run(llama, dataset, tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(snapshot, "save_weights", killed)
        with pytest.raises(Killed):
            run_training(run)
    assert [state.step for state in list_states(tmp_path)] == [3]
    events = run_training(run)
    assert losses(events)[-5:] == pytest.approx(losses(plain[1])[3:], abs=1e-6)
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == ["step-6", "step-8"]


def test_a_finished_training_is_only_exported_again(llama, dataset, tmp_path):
    run = make_run(llama, dataset, tmp_path, max_steps=2)
    run_training(run)
    before = load_file(tmp_path / "export" / "model.safetensors")
    events = run_training(run)
    assert len(of_type(events, "metrics")) == 2
    assert of_type(events, "exported") == [{"step": 2}, {"step": 2}]
    after = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_state_of_another_run_is_refused(llama, dataset, tmp_path):
    run_training(make_run(llama, dataset, tmp_path, max_steps=1))
    with pytest.raises(ConfigError, match=r"step-1 .* was saved with seed 42, this run has 43"):
        run_training(make_run(llama, dataset, tmp_path, max_steps=2, seed=43))
    other = make_run(llama, write_dataset(tmp_path / "other.jsonl", 9), tmp_path, max_steps=2)
    with pytest.raises(ConfigError, match="dataset_sha256"):
        run_training(other)
    again = make_run(llama, dataset, tmp_path, max_steps=1, seed=43, resume=False)
    assert of_type(run_training(again), "exported")[-1] == {"step": 1}


def test_a_cancelled_run_ends_at_once_and_saves_nothing(llama, dataset, tmp_path, monkeypatch):
    class Ended(BaseException):
        pass

    def ended(status):
        raise Ended(status)

    def cancel():
        (tmp_path / "cancel").touch()
        terminate()

    stop_at(monkeypatch, 2, cancel)
    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(Ended, match="143"):
        run_training(make_run(llama, dataset, tmp_path))
    assert list_states(tmp_path) == []
    assert of_type(read_events(tmp_path), "stopped") == []


# Publishing


def check_export(folder, *, dtype="float32"):
    contract = read_contract(folder / "export")
    tokenizer = load_tokenizer(folder / "export")
    ids = renderer(contract, tokenizer).answer_ids
    model = load_model(folder / "export", contract.head, dtype=dtype, device="cpu")
    head = (
        score_head(contract.head)
        if contract.head is Head.SEQ_CLS
        else score_head(contract.head, yes=ids.yes, no=ids.no)
    )
    prove(PromptScorer(model, head), contract, dtype=dtype)
    return contract


def test_the_export_is_a_plain_folder_with_its_contract(plain, dataset):
    folder, _ = plain
    names = sorted(path.name for path in (folder / "export").iterdir())
    assert names == [
        "README.md", "config.json", "generation_config.json", "model.safetensors", "reranker.json", "tokenizer.json",
        "tokenizer_config.json",
    ]  # fmt: skip
    contract = check_export(folder)
    assert contract.base_model == "tiny"
    assert contract.tolerance == {"float32": 1e-3}
    assert contract.arguments.learning_rate == 1e-3
    assert len(contract.probes) >= 8
    config = json.loads((folder / "export" / "config.json").read_text())
    assert config["use_cache"] is True
    assert not (folder / "export.tmp").exists()


def test_the_export_has_the_trained_weights(plain):
    folder, _ = plain
    exported = load_file(folder / "export" / "model.safetensors")
    trained = load_file(folder / "states" / "step-8" / "weights.safetensors")
    assert all(
        torch.equal(exported[name.removeprefix("model.")], trained[name]) for name in trained
    )


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        (DROPOUT, "float32"),
        ({**DROPOUT, "loss": "margin_mse", "export_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "use_lora": True, "export_dtype": "float32"}, "float32"),
        ({"head": "seq_cls", "prompt_template": "pair", "append_eos_token": True}, "float32"),
        ({"head": "seq_cls", "prompt_template": "pair", "use_lora": True}, "float32"),
    ],
)
def test_every_form_of_training_is_published_and_proved(llama, dataset, tmp_path, changes, dtype):
    events = run_training(make_run(llama, dataset, tmp_path, **{"max_steps": 2, **changes}))
    assert of_type(events, "exported") == [{"step": 2}]
    contract = check_export(tmp_path, dtype=dtype)
    assert contract.dtype == dtype
    assert not list((tmp_path / "export").glob("*adapter*"))


@pytest.mark.parametrize("loss", ["listwise_kl", "margin_mse", "ranknet", "listnet"])
def test_losses_with_a_teacher_train(llama, dataset, tmp_path, loss):
    got = losses(run_training(make_run(llama, dataset, tmp_path, loss=loss)))
    # The same rows in both epochs, in another order.
    assert sum(got[4:]) < sum(got[:4])


# Errors, before the model loads where they can be known then


def test_a_nan_loss_ends_the_run(llama, dataset, tmp_path):
    with pytest.raises(NotFiniteError, match=r"the (loss|gradient norm) of step \d"):
        run_training(make_run(llama, dataset, tmp_path, learning_rate=1e30, max_grad_norm=0))


def test_a_query_that_is_too_long_ends_the_run_before_the_model_loads(llama, tmp_path):
    path = write_dataset(tmp_path / "train.jsonl", 3)
    row = {
        "query": "x" * 20000,
        "positive_passages": [{"text": "a"}],
        "negative_passages": [{"text": "b"}],
    }
    path.write_text(path.read_text() + json.dumps(row) + "\n")
    with pytest.raises(FormatError, match=r"train.jsonl:4: field 'query'"):
        run_training(make_run(llama, path, tmp_path / "run"))
    phases = [data["phase"] for data in of_type(read_events(tmp_path / "run"), "phase")]
    assert phases == ["preparing"]


def test_a_model_without_a_tokenizer(tmp_path, dataset):
    model = tiny_folder(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    with pytest.raises(JobError, match="has no tokenizer") as caught:
        run_training(make_run(model, dataset, tmp_path / "run"))
    assert caught.value.reason == "model_error"


def test_a_checkpoint_goes_on_being_trained_but_not_with_another_tokenizer(
    plain, dataset, tmp_path
):
    model = tmp_path / "model"
    shutil.copytree(plain[0] / "export", model)
    run_training(make_run(model, dataset, tmp_path / "more", max_steps=1))
    other = json.loads((model / "tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    yes, no = "\u0120yes", "\u0120no"
    vocabulary[yes], vocabulary[no] = vocabulary[no], vocabulary[yes]
    (model / "tokenizer.json").write_text(json.dumps(other))
    with pytest.raises(ContractError, match=r"tokenizer of .* differs: contract has sha256"):
        run_training(make_run(model, dataset, tmp_path / "run"))
    phases = [data["phase"] for data in of_type(read_events(tmp_path / "run"), "phase")]
    assert phases == ["preparing"]


def test_prompts_too_long_for_the_rotary_scaling_are_refused_before_the_model_loads(
    dataset, tmp_path
):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    model = tiny_folder(tmp_path / "model", rope_parameters=rope, max_position_embeddings=64)
    with pytest.raises(ConfigError, match="expected rerank_max_len 64 at most, got 96"):
        run_training(make_run(model, dataset, tmp_path / "run"))
    phases = [data["phase"] for data in of_type(read_events(tmp_path / "run"), "phase")]
    assert phases == ["preparing"]


@pytest.mark.parametrize("name", ["owner/kernel", "kernels-community/flash-attn2", "paged|sdpa"])
def test_an_attention_from_elsewhere_is_refused(llama, dataset, tmp_path, name):
    with pytest.raises(ValidationError, match="attn_implementation"):
        make_run(llama, dataset, tmp_path, packing=False, attn_implementation=name)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fsdp": "full_shard"}, "--fsdp full_shard needs GPUs"),
        ({"dtype": "float16"}, "--dtype float16 needs a GPU"),
        ({"min_lr": 1e-5, "lr_scheduler_type": "linear"}, "--min_lr is honoured with"),
        ({"min_lr": 1.0}, "--min_lr 1 is above --learning_rate 0.001"),
        ({"attn_implementation": "eager"}, "--packing false only"),
        (
            {"head": "seq_cls"},
            "head 'seq_cls' and template 'tevatron' do not go together; expected pair",
        ),
        ({"prompt_template": "pair"}, "head 'yes_no' and template 'pair'"),
    ],
)
def test_what_cannot_be_honoured_is_named(llama, dataset, tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        run_training(make_run(llama, dataset, tmp_path, **changes))


def test_the_schedule_ends_at_min_lr(llama, dataset, tmp_path):
    events = run_training(
        make_run(llama, dataset, tmp_path, min_lr=1e-4, warmup_ratio=0.25, max_steps=8)
    )
    rates = [data["learning_rate"] for data in of_type(events, "metrics")]
    # Two steps of warm-up from 0, then a cosine from 1e-3 to 1e-4 over six.
    assert rates[:3] == pytest.approx([0.0, 5e-4, 1e-3])
    assert rates[5] == pytest.approx(1e-4 + 9e-4 * (1 + math.cos(math.pi * 3 / 6)) / 2)
