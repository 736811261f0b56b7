"""Groups of modules against real names; adapters that train and nothing else."""

import pytest
import torch
from tests.support.tiny_model import tiny_config
from torch import nn
from transformers import AutoModelForCausalLM

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
