"""The export job: another checkpoint from a saved state."""

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.trainer.program.training import make_run, of_type, read_events, run_export, run_training

from tevatron.core.contracts.checkpoint import read_contract
from tevatron.trainer.program.export import main

LORA = {"use_lora": True, "lora_r": 4, "save_steps": 2, "max_steps": 4}


@pytest.fixture(scope="module")
def lora_run(llama, dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    run_training(make_run(llama, dataset, folder, **LORA))
    return folder


def test_the_newest_state_gives_what_training_published(lora_run, tmp_path):
    assert run_export(tmp_path, lora_run) == 0
    events = read_events(tmp_path)
    assert of_type(events, "exported") == [{"step": 4}]
    said = {"level": "info", "message": "exporting the newest state, of step 4"}
    assert of_type(events, "log") == [said]
    one = load_file(lora_run / "export" / "model.safetensors")
    two = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_an_older_state_in_another_dtype(lora_run, tmp_path):
    assert run_export(tmp_path, lora_run, step=2, dtype="bfloat16") == 0
    tensors = load_file(tmp_path / "export" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    contract = read_contract(tmp_path / "export")
    assert contract.dtype == "bfloat16"
    assert set(contract.tolerance) == {"float32", "bfloat16"}


def test_the_adapter_alone(lora_run, llama, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert run_export(tmp_path, lora_run, form="adapter") == 0
    names = {path.name for path in (tmp_path / "export").iterdir()}
    assert {
        "adapter_model.safetensors",
        "adapter_config.json",
        "reranker.json",
        "tokenizer.json",
    } <= names
    assert "model.safetensors" not in names
    config = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny"
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(llama), tmp_path / "export"
    )
    contract = read_contract(tmp_path / "export")
    for probe in contract.probes:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([probe.token_ids])).logits[0, -1]
        score = (logits[contract.answer_ids.yes] - logits[contract.answer_ids.no]).item()
        assert score == pytest.approx(probe.score, abs=1e-3)


def test_a_run_that_publishes_its_adapter_alone(llama, dataset, lora_run, tmp_path):
    run_training(make_run(llama, dataset, tmp_path, export_form="adapter", **LORA))
    published = tmp_path / "export"
    assert not (published / "model.safetensors").exists()
    export = tmp_path / "job"
    export.mkdir()
    assert run_export(export, lora_run, form="adapter") == 0
    one = load_file(published / "adapter_model.safetensors")
    two = load_file(export / "export" / "adapter_model.safetensors")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_step_that_is_gone_is_an_error_with_those_there(lora_run, tmp_path):
    assert run_export(tmp_path, lora_run, step=3) == 1
    (failed,) = of_type(read_events(tmp_path), "failed")
    assert failed["reason"] == "config_error"
    assert "step 3; there are: 2, 4" in failed["message"]


def test_the_adapter_of_a_full_run(llama, dataset, tmp_path):
    run_training(make_run(llama, dataset, tmp_path / "run", max_steps=1))
    out = tmp_path / "out"
    out.mkdir()
    assert run_export(out, tmp_path / "run", form="adapter") == 1
    assert "needs a LoRA run" in of_type(read_events(out), "failed")[0]["message"]
    assert not (out / "export").exists()


def test_a_config_that_is_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path / "config.json")]) == 2
    assert main([]) == 2


def test_a_folder_that_is_no_run(tmp_path):
    assert run_export(tmp_path, tmp_path / "nothing") == 1
    failed = of_type(read_events(tmp_path), "failed")[0]
    assert "is not the config of a training run" in failed["message"]
