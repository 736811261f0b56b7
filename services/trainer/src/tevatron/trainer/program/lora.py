"""LoRA: named groups of modules, resolved against the model's real names, and the adapters put on them.

A group that matches nothing is an error that lists what there is, or a warning where the model's config has no such
part. Knows no training.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

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
"""Regular expressions over full module names."""

DEFAULT_DENSE = ("attn", "mlp")
DEFAULT_MOE = ("attn", "moe_experts", "moe_shared")

_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")
_SHARED_FIELDS = ("n_shared_experts", "shared_expert_intermediate_size", "num_shared_experts")


def add_lora(model: PreTrainedModel, arguments: TrainArguments) -> PeftModel:
    """Put adapters on the modules that the arguments name; only they stay trainable, and a `seq_cls` head's row."""
    config = LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        lora_dropout=arguments.lora_dropout,
        target_modules=target_pattern(model, arguments),
    )
    adapted = get_peft_model(model, config)
    score = getattr(model, "score", None)
    if isinstance(score, nn.Linear):
        score.weight.requires_grad_(True)
    assert isinstance(adapted, PeftModel)
    return adapted


def target_pattern(model: PreTrainedModel, arguments: TrainArguments) -> str:
    """Return the regular expression of the modules to adapt; groups win over module names."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if arguments.lora_target_groups or not arguments.lora_target_modules:
        groups = arguments.lora_target_groups or default_groups(model.config)
        patterns = _group_patterns(groups, names, model.config)
    else:
        patterns = [_module_pattern(name, names) for name in _module_names(arguments)]
    if not patterns:
        raise ConfigError(_matches_nothing("what was asked for", names))
    return "|".join(patterns)


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


def _group_patterns(groups: Iterable[str], names: list[str], config: PreTrainedConfig) -> list[str]:
    patterns = []
    for group in groups:
        if group not in GROUPS:
            raise ConfigError(unknown_name("LoRA target group", group, GROUPS))
        matched = _matching(GROUPS[group], names)
        if matched:
            logger.info("LoRA group '%s' adapts %d modules", group, len(matched))
            patterns.append(GROUPS[group])
        elif _lacks_part(group, config):
            logger.warning(
                "LoRA group '%s' is left out: a model of type '%s' with this config has no such part",
                group,
                config.model_type,
            )
        else:
            raise ConfigError(_matches_nothing(f"LoRA group '{group}'", names))
    return patterns


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
