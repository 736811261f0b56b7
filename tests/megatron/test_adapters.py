"""Adapters alone, in PEFT's format: loaded by PEFT itself, they score like the merged checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tests.megatron.runs import Layout, export_job, largest_difference, run
from transformers import AutoModelForCausalLM, PreTrainedModel

from tevatron.core.contracts.checkpoint import read_contract
from tevatron.trainer.program.backends.megatron.adapters import shortest

FULL = pytest.mark.full
EXPERTS = {"lora_target_groups": ["attn", "moe_experts"]}
EACH = {**EXPERTS, "megatron": {"lora_expert_adapters": "per_expert"}}


def probe_scores(model: PreTrainedModel | PeftModel, published: Path) -> list[float]:
    """Score the contract's probes one at a time, with nothing of ours."""
    contract = read_contract(published)
    scores = []
    for probe in contract.probes:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([probe.token_ids])).logits[0, -1]
        scores.append(float(logits[contract.answer_ids.yes] - logits[contract.answer_ids.no]))
    return scores


@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [
        ("llama", (1, 1, 1, 1), {}),
        pytest.param("qwen2", (2, 2, 1, 1), {"lora_target_groups": ["attn"]}, marks=FULL),
        ("qwen3", (2, 1, 2, 1), {"lora_target_modules": ["linear_qkv", "linear_fc2"]}),
        pytest.param("qwen3_moe", (2, 1, 1, 2), EXPERTS, marks=FULL),
        ("qwen3_moe", (2, 1, 1, 2), EACH),
        pytest.param(
            "qwen3_moe", (2, 2, 1, 1), {"lora_target_groups": ["moe_experts"]}, marks=FULL
        ),
        pytest.param(
            "qwen3_moe",
            (2, 1, 1, 2),
            {"lora_target_groups": ["moe_experts", "moe_router"]},
            marks=FULL,
        ),
    ],
)
def test_peft_loads_them_and_they_score_like_the_merged_checkpoint(
    tmp_path: Path, kind: str, layout: Layout, changes: dict[str, object]
):
    out = run(
        tmp_path,
        kind,
        layout,
        max_steps=2,
        learning_rate=1e-2,
        use_lora=True,
        export_form="adapter",
        **changes,
    )
    published = out / "export"
    files = {path.name for path in published.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "reranker.json"} <= files
    assert not [name for name in files if name.startswith("model")]
    config = json.loads((published / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"]) == ("base", 16)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32)
    plain = probe_scores(base, published)
    adapted = probe_scores(PeftModel.from_pretrained(base, published), published)
    merged = export_job(tmp_path, "merged")
    assert largest_difference(merged) < 1e-4
    model = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert adapted == pytest.approx(probe_scores(model, merged), abs=1e-4)
    assert max(abs(one - other) for one, other in zip(adapted, plain, strict=True)) > 1e-2
    # The export job makes the same of the saved state.
    again = export_job(tmp_path, "again", form="adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / kind, dtype=torch.float32)
    assert probe_scores(PeftModel.from_pretrained(base, again), again) == pytest.approx(
        adapted, abs=1e-5
    )


def test_the_adapters_of_a_full_run_are_refused(tmp_path: Path):
    run(tmp_path, "llama", (1, 1, 1, 1), max_steps=1)
    with pytest.raises(AssertionError, match="form 'adapter' needs a LoRA run"):
        export_job(tmp_path, "other", form="adapter")


def test_names_are_as_short_as_they_can_be():
    every = ["layers.0.mlp.up", "layers.0.shared.mlp.up", "layers.0.attn.q", "layers.1.attn.q"]
    assert shortest({"layers.0.attn.q", "layers.1.attn.q"}, every) == ["q"]
    assert shortest({"layers.0.shared.mlp.up"}, every) == ["shared.mlp.up"]
    assert shortest({"layers.0.attn.q"}, every) == ["0.attn.q"]
    assert shortest({"layers.0.mlp.up"}, every) == ["0.mlp.up"]
