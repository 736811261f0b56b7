"""Groups of modules against real names; adapters that train and nothing else."""

import pytest
import torch
from tests.support.tiny_model import tiny_config, tiny_tokenizer
from tests.trainer.program.training import make_run, of_type, run_training
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.errors import ConfigError
from tevatron.trainer.program.lora import add_lora, default_groups


def adapted(kind="llama", **arguments):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(kind))
    add_lora(model, TrainArguments(use_lora=True, lora_r=4, **arguments))
    return sorted(
        {name.split(".lora_")[0] for name, one in model.named_parameters() if one.requires_grad}
    ), model


def test_without_a_choice_attention_and_mlp_are_adapted():
    names, model = adapted()
    kinds = {name.rsplit(".", 1)[-1] for name in names}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert len(names) == 2 * 7
    assert all("lora_" in name for name, one in model.named_parameters() if one.requires_grad)


def test_one_group():
    names, _ = adapted("qwen3", lora_target_groups=["mlp"])
    assert {name.rsplit(".", 1)[-1] for name in names} == {"gate_proj", "up_proj", "down_proj"}


def test_module_names_and_a_group_that_wins():
    names, _ = adapted(lora_target_modules=["q_proj,v_proj"])
    assert {name.rsplit(".", 1)[-1] for name in names} == {"q_proj", "v_proj"}
    names, _ = adapted(lora_target_modules=["q_proj"], lora_target_groups=["mlp"])
    assert {name.rsplit(".", 1)[-1] for name in names} == {"gate_proj", "up_proj", "down_proj"}


def test_a_name_that_matches_nothing_lists_what_there_is():
    with pytest.raises(
        ConfigError, match=r"module 'query' matches no .*layers\.\*\.self_attn\.q_proj"
    ):
        adapted(lora_target_modules=["query"])


def test_an_unknown_group_lists_the_groups():
    with pytest.raises(
        ConfigError, match=r"attn, mlp, moe_experts, moe_router, moe_shared.*'attn'"
    ):
        adapted(lora_target_groups=["attm"])


def test_expert_groups_on_a_dense_model_are_a_warning(caplog):
    names, _ = adapted(lora_target_groups=["attn", "moe_experts", "moe_shared", "moe_router"])
    assert {name.rsplit(".", 1)[-1] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert caplog.text.count("is left out: a model of type 'llama'") == 3


def test_only_expert_groups_on_a_dense_model_leave_nothing():
    with pytest.raises(ConfigError, match="matches no linear module"):
        adapted(lora_target_groups=["moe_experts"])


def test_a_group_that_should_match_and_does_not_is_an_error():
    model = AutoModelForCausalLM.from_config(tiny_config())
    for layer in model.model.layers:
        layer.self_attn = nn.Identity()
    with pytest.raises(ConfigError, match=r"LoRA group 'attn' matches no .*mlp\.down_proj"):
        add_lora(model, TrainArguments(use_lora=True))


def test_defaults_of_mixtures_of_experts():
    config = tiny_config()
    config.num_experts = 8
    assert default_groups(config) == ["attn", "moe_experts", "moe_shared"]


def moe_model():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        pad_token_id=None, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def test_stacked_experts_are_adapted_trained_and_merged():
    model = moe_model()
    ids = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        before = model(input_ids=ids).logits
    adapted = add_lora(
        model,
        TrainArguments(lora_target_groups=["attn", "moe_experts", "moe_shared", "moe_router"]),
    )
    names = {name for name, one in model.named_parameters() if one.requires_grad}
    assert any(".experts." in name for name in names)
    assert any(".gate." in name for name in names)
    assert any(".q_proj." in name for name in names)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for _ in range(2):
        model(input_ids=ids).logits[0, -1, 7].backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        trained = model(input_ids=ids).logits
        merged = adapted.merge_and_unload()(input_ids=ids).logits
    assert (trained - before).abs().max() > 1e-3
    torch.testing.assert_close(merged, trained, atol=1e-4, rtol=1e-4)


def test_dropout_on_stacked_experts_is_refused():
    with pytest.raises(ConfigError, match=r"--lora_dropout 0.1 .*experts.down_proj"):
        add_lora(moe_model(), TrainArguments(lora_dropout=0.1))


def test_a_mixture_of_experts_is_trained_and_published(dataset, tmp_path):
    folder = tmp_path / "moe"
    moe_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    events = run_training(make_run(folder, dataset, tmp_path / "run", use_lora=True, max_steps=2))
    assert of_type(events, "exported") == [{"step": 2}]
