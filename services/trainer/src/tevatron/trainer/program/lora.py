"""LoRA: named groups of modules, resolved against the model's real names, and the adapters put on them.

A group that matches nothing is an error that lists what there is, or a warning where the model's config has no such
part. Knows no training.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import NamedTuple

from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.errors import ConfigError, unknown_name

logger = logging.getLogger(__name__)

_ATTENTION = r"(?:q_proj|k_proj|v_proj|o_proj|out_proj|qkv_proj|c_attn|dense)"
_MLP = r"(?:gate_proj|up_proj|down_proj|gate_up_proj|fc1|fc2|dense_h_to_4h|dense_4h_to_h)"

GROUPS: dict[str, str] = {
    "attn": rf".*\.(?:self_attn|attn|attention|self_attention)\.{_ATTENTION}",
    "mlp": rf".*\.(?:mlp|feed_forward)\.{_MLP}",
    "moe_experts": rf".*\.experts\.\d+\.{_MLP}",
    "moe_shared": rf".*\.shared_experts?\.{_MLP}",
    "moe_router": r".*\.(?:mlp|block_sparse_moe)\.(?:gate|router)",
}
"""Regular expressions over full names of linear modules."""

PARAMETERS: dict[str, str] = {
    "moe_experts": r".*\.experts\.(?:gate_up_proj|down_proj)",
    "moe_router": r".*\.(?:mlp|block_sparse_moe)\.(?:gate|router)\.weight",
}
"""The same for models that keep a group in stacked parameters instead, as transformers does for experts."""

DEFAULT_DENSE = ("attn", "mlp")
DEFAULT_MOE = ("attn", "moe_experts", "moe_shared")

_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
_SHARED_FIELDS = ("n_shared_experts", "shared_expert_intermediate_size", "num_shared_experts")


class Targets(NamedTuple):
    """What is adapted: linear modules by regular expression, parameters by the ends of their names."""

    modules: str | None
    parameters: list[str]


def add_lora(model: PreTrainedModel, arguments: TrainArguments) -> PeftModel:
    """Put adapters on what the arguments name; only they stay trainable, and a `seq_cls` head's row."""
    targets = find_targets(model, arguments)
    if targets.parameters and arguments.lora_dropout:
        raise ConfigError(
            f"--lora_dropout {arguments.lora_dropout:g} cannot be honoured on the stacked parameters "
            f"{', '.join(targets.parameters)}; use 0, or leave their group out"
        )
    config = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=targets.modules or [],
        target_parameters=targets.parameters or None,
    )
    adapted = get_peft_model(model, config)
    score = getattr(model, "score", None)
    if isinstance(score, nn.Linear):
        score.weight.requires_grad_(True)
    assert isinstance(adapted, PeftModel)
    return adapted


def find_targets(model: PreTrainedModel, arguments: TrainArguments) -> Targets:
    """Resolve groups or module names against the model; groups win."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    parameters: list[str] = []
    if arguments.lora_target_groups or not arguments.lora_target_modules:
        groups = arguments.lora_target_groups or default_groups(model.config)
        patterns = []
        for group in groups:
            found = _group_targets(group, names, model)
            patterns += [] if found.modules is None else [found.modules]
            parameters += found.parameters
    else:
        patterns = [_module_pattern(name, names) for name in _module_names(arguments)]
    if not patterns and not parameters:
        raise ConfigError(_matches_nothing("what was asked for", names))
    return Targets("|".join(patterns) or None, parameters)


def _module_names(arguments: TrainArguments) -> list[str]:
    # The reference writes them as one string with commas.
    parts = arguments.lora_target_modules or []
    return [name.strip() for part in parts for name in part.split(",") if name.strip()]


def _module_pattern(module: str, names: list[str]) -> str:
    pattern = rf"(?:.*\.)?{re.escape(module)}"
    if not _matching(pattern, names):
        raise ConfigError(_matches_nothing(f"module '{module}'", names))
    return pattern


def default_groups(config: PreTrainedConfig) -> list[str]:
    """Return the groups that are adapted without a choice."""
    return list(DEFAULT_MOE if _has(config, _EXPERT_FIELDS) else DEFAULT_DENSE)


def _group_targets(group: str, names: list[str], model: PreTrainedModel) -> Targets:
    if group not in GROUPS:
        raise ConfigError(unknown_name("LoRA target group", group, GROUPS))
    matched = _matching(GROUPS[group], names)
    if matched:
        logger.info("LoRA group '%s' adapts %d modules", group, len(matched))
        return Targets(GROUPS[group], [])
    stacked = _matching(PARAMETERS.get(group, ""), (name for name, _ in model.named_parameters()))
    if stacked:
        logger.info("LoRA group '%s' adapts %d stacked parameters", group, len(stacked))
        return Targets(None, sorted({".".join(name.split(".")[-3:]) for name in stacked}))
    if not _lacks_part(group, model.config):
        raise ConfigError(_matches_nothing(f"LoRA group '{group}'", names))
    logger.warning(
        "LoRA group '%s' is left out: a model of type '%s' with this config has no such part",
        group,
        model.config.model_type,
    )
    return Targets(None, [])


def _lacks_part(group: str, config: PreTrainedConfig) -> bool:
    if group == "moe_shared":
        return not _has(config, _SHARED_FIELDS)
    if group == "mlp":
        return _has(config, _EXPERT_FIELDS)
    return group.startswith("moe_") and not _has(config, _EXPERT_FIELDS)


def _has(config: PreTrainedConfig, fields: Iterable[str]) -> bool:
    return any(getattr(config.get_text_config(), field, None) for field in fields)


def _matching(pattern: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if re.fullmatch(pattern, name)]


def _matches_nothing(what: str, names: Iterable[str]) -> str:
    kinds = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
    return f"{what} matches no linear module of this model; there are: {', '.join(kinds)}"
