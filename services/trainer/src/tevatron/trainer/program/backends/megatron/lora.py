"""LoRA on Megatron's modules: named groups, found among the model's real names, and adapters that begin alike.

A group that matches nothing on any rank is an error that lists what there is, or a warning where the model's config has
no such part. Every adapter's first matrix is drawn whole, from the seed and its name, and then cut, so that a layout
does not decide how a training begins.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.errors import ConfigError, unknown_name
from tevatron.trainer.program.backends.megatron.adapted import (
    WholeLoRA,
    meet_once_a_step,
    shared_adapters,
)
from tevatron.trainer.program.backends.megatron.parallel import Ranks

logger = logging.getLogger(__name__)

_FC = r"linear_fc[12]"

GROUPS: dict[str, str] = {
    "attn": r".*\.self_attention\.linear_(?:qkv|proj|q_proj|(?:q|kv)_(?:up|down)_proj)",
    "mlp": rf".*\.mlp\.{_FC}",
    "moe_experts": rf".*\.mlp\.experts\.(?:local_experts\.\d+\.)?{_FC}",
    "moe_shared": rf".*\.mlp\.shared_experts\.{_FC}",
    "moe_router": r".*\.mlp\.router",
}
"""Regular expressions over full module names; experts are `experts.linear_fc1` where their matrices are grouped into
one product, and `experts.local_experts.N.linear_fc1` where they are computed one after the other."""

DEFAULT_DENSE = ("attn", "mlp")
DEFAULT_MOE = ("attn", "moe_experts", "moe_shared")

_ADAPTABLE = re.compile(r".*\.(?:linear_\w+|router)")


def adapt(chunks: list[Any], arguments: TrainArguments, ranks: Ranks) -> None:
    """Put adapters on the modules that the arguments name; nothing else stays trainable."""
    names = adaptable_names(chunks)
    provider = chunks[0].config
    all_names = everywhere(names)
    patterns = target_patterns(all_names, arguments, provider)
    _check_routers(_matching(patterns, all_names), tensor=ranks.layout.tensor)
    chosen = _matching(patterns, names)
    lora = WholeLoRA(
        target_modules=chosen or ["no module of this stage"],
        dim=arguments.lora_r,
        alpha=arguments.lora_alpha,
        dropout=arguments.lora_dropout,
        share_expert_adapters=arguments.megatron.lora_expert_adapters == "shared",
    )
    lora(chunks, training=True)
    for chunk in chunks:
        meet_once_a_step(chunk)
        _draw_adapters(chunk, seed=arguments.seed)
        _count_shared_once(chunk)


def _matching(patterns: list[str], names: list[str]) -> list[str]:
    return [name for name in names if any(re.fullmatch(one, name) for one in patterns)]


def _check_routers(chosen: list[str], *, tensor: int) -> None:
    """Refuse what the bridge does wrongly: it gathers a router's adapter over ranks that hold different tokens."""
    if tensor > 1 and any(name.endswith(".router") for name in chosen):
        raise ConfigError(
            f"LoRA on the routers needs tensor_model_parallel_size 1, got {tensor}: their adapters would mix the tokens "
            "of these ranks"
        )


def adaptable_names(chunks: Iterable[Any]) -> list[str]:
    """Return the names of the modules on this rank that an adapter can be put on."""
    return [
        name for chunk in chunks for name, _ in chunk.named_modules() if _ADAPTABLE.fullmatch(name)
    ]


def everywhere(names: list[str]) -> list[str]:
    """Return the names on all ranks: a pipeline stage may lack what another has."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, names)
    return sorted({name for one in gathered for name in one})


def target_patterns(names: list[str], arguments: TrainArguments, provider: Any) -> list[str]:
    """Return regular expressions of the modules to adapt; groups win over module names."""
    if arguments.lora_target_groups or not arguments.lora_target_modules:
        is_moe = bool(provider.num_moe_experts)
        groups = arguments.lora_target_groups or (DEFAULT_MOE if is_moe else DEFAULT_DENSE)
        patterns = [
            pattern for group in groups for pattern in _group_pattern(group, names, provider)
        ]
    else:
        modules = [
            name.strip() for part in arguments.lora_target_modules for name in part.split(",")
        ]
        patterns = [_module_pattern(name, names) for name in modules if name]
    if not patterns:
        raise ConfigError(_matches_nothing("what was asked for", names))
    return patterns


def _group_pattern(group: str, names: list[str], provider: Any) -> list[str]:
    if group not in GROUPS:
        raise ConfigError(unknown_name("LoRA target group", group, GROUPS))
    matched = [name for name in names if re.fullmatch(GROUPS[group], name)]
    if matched:
        logger.info("LoRA group '%s' adapts %s", group, ", ".join(_kinds(matched)))
        return [GROUPS[group]]
    if _lacks_part(group, provider):
        logger.warning("LoRA group '%s' is left out: this model has no such part", group)
        return []
    raise ConfigError(_matches_nothing(f"LoRA group '{group}'", names))


def _lacks_part(group: str, provider: Any) -> bool:
    is_moe = bool(provider.num_moe_experts)
    if group == "moe_shared":
        return not provider.moe_shared_expert_intermediate_size
    return group == "mlp" if is_moe else group.startswith("moe_")


def _module_pattern(module: str, names: list[str]) -> str:
    pattern = rf"(?:.*\.)?{re.escape(module)}"
    if not any(re.fullmatch(pattern, name) for name in names):
        raise ConfigError(_matches_nothing(f"module '{module}'", names))
    return pattern


def _matches_nothing(what: str, names: Iterable[str]) -> str:
    return f"{what} matches no module of this model; there are: {', '.join(_kinds(names))}"


def _kinds(names: Iterable[str]) -> list[str]:
    return sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})


@torch.no_grad()
def _draw_adapters(chunk: Any, *, seed: int) -> None:
    offset = chunk.decoder.layers[0].layer_number - 1 if len(chunk.decoder.layers) else 0
    for name, parameter in chunk.named_parameters():
        if not name.endswith(".adapter.linear_in.weight"):
            continue
        whole_name = _with_offset(name, offset)
        if parameter.dim() == 3:
            for number, matrix in enumerate(parameter, _first_expert(chunk.config)):
                _draw(matrix, parameter, name=f"{whole_name}:{number}", seed=seed)
        else:
            _draw(parameter, parameter, name=_with_expert(whole_name, chunk.config), seed=seed)


def _with_offset(name: str, offset: int) -> str:
    """Return the name with the layer's number in the whole model."""
    return re.sub(r"(?<=\.layers\.)\d+", lambda match: str(int(match[0]) + offset), name, count=1)


def _with_expert(name: str, config: Any) -> str:
    """Return a sequential expert's name as a grouped one's, with its number in the whole layer."""
    found = re.search(r"\.local_experts\.(\d+)", name)
    if found is None:
        return name
    return f"{name.replace(found[0], '')}:{_first_expert(config) + int(found[1])}"


def _first_expert(config: Any) -> int:
    """Return the number of this rank's first expert."""
    local = config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    return int(local * parallel_state.get_expert_model_parallel_rank())


def _draw(matrix: Tensor, parameter: torch.nn.Parameter, *, name: str, seed: int) -> None:
    """Fill a matrix of the parameter with this rank's part of the whole one, uniform as PEFT draws it."""
    group = parallel_state.get_tensor_model_parallel_group()
    is_cut = getattr(parameter, "tensor_model_parallel", False) and group.size() > 1
    # Experts are whole on every rank.
    is_cut = is_cut and ".experts." not in name
    dim = vars(parameter)["partition_dim"] if is_cut else 0
    shape = list(matrix.shape)
    if is_cut:
        shape[dim] *= group.size()
    digest = hashlib.sha256(f"tevatron:lora:{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") % 2**63)
    bound = 1 / math.sqrt(shape[-1])
    whole = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    part = whole.chunk(group.size(), dim=dim)[group.rank()] if is_cut else whole
    matrix.copy_(part)


def _count_shared_once(chunk: Any) -> None:
    """Take the copies of a layer's one expert adapter out of the gradient norm, but for the first rank's."""
    if parallel_state.get_expert_model_parallel_rank() == 0:
        return
    for parameter in shared_adapters(chunk):
        vars(parameter)["shared"] = True
