"""A LoRA run's adapters alone, in PEFT's format: the bridge's pairs, put into the model that transformers has.

Which names the format has is PEFT's business: a model without numbers is wrapped by PEFT itself and the pairs are put
where it wants them. Experts, which transformers keep in stacked parameters, become PEFT's target parameters.

Shapes: E experts, R rank of the adapters, I input size, O output size.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tevatron.core.contracts.train import TrainArguments
from tevatron.core.errors import ContractError
from tevatron.core.nn.loading import load_config
from tevatron.trainer.program.backends.megatron.model import MegatronModel

_SUFFIX = re.compile(r"(.+)\.lora_([AB])\.weight")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")


class Pair(NamedTuple):
    """One adapter as PEFT stores it."""

    down: Tensor
    """[R, I], or [E * R, I] of stacked experts"""
    up: Tensor
    """[O, R], or [O, R * E] of stacked experts"""


def peft_model(
    model: MegatronModel, base: Path, arguments: TrainArguments, *, is_writer: bool
) -> PeftModel | None:
    """Return the adapters in a model whose other weights are not there; None on the ranks that only take part."""
    given = {
        name: tensor.clone()
        for name, tensor in model.bridge.export_adapter_weights(
            model.chunks, cpu=True, show_progress=False
        )
    }
    if not is_writer:
        return None
    with torch.device("meta"):
        skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(load_config(base))  # type: ignore[no-untyped-call]
    modules, parameters = _targets(_pairs(given), skeleton)
    adapted = get_peft_model(skeleton, _config(modules, parameters, skeleton, arguments))
    assert isinstance(adapted, PeftModel)
    _fill(adapted, {**modules, **parameters})
    return adapted


def _pairs(given: Mapping[str, Tensor]) -> dict[str, Pair]:
    """Return the pairs by the name of the module that they are for."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in given.items():
        found = _SUFFIX.fullmatch(name)
        if found is None:
            raise ContractError(f"the bridge gave an adapter '{name}', expected ....lora_A.weight")
        halves.setdefault(found[1], {})[found[2]] = tensor
    return {name: Pair(half["A"], half["B"]) for name, half in halves.items()}


def _targets(
    pairs: Mapping[str, Pair], skeleton: PreTrainedModel
) -> tuple[dict[str, Pair], dict[str, Pair]]:
    """Divide the pairs into those of linear modules and those of parameters, experts stacked."""
    linear = {name for name, module in skeleton.named_modules() if isinstance(module, nn.Linear)}
    own = {name for name, _ in skeleton.named_parameters()}
    modules: dict[str, Pair] = {}
    parameters: dict[str, Pair] = {}
    experts: dict[str, dict[int, dict[str, Pair]]] = {}
    for name, pair in pairs.items():
        expert = _EXPERT.fullmatch(name)
        if name in linear:
            modules[name] = pair
        elif f"{name}.weight" in own:
            parameters[f"{name}.weight"] = pair
        elif expert is not None and f"{expert[1]}.down_proj" in own:
            experts.setdefault(expert[1], {}).setdefault(int(expert[2]), {})[expert[3]] = pair
        else:
            raise ContractError(f"transformers' model has nothing to put the adapter '{name}' on")
    for name, layer in experts.items():
        if getattr(skeleton.get_submodule(name), "is_transposed", False):
            raise ContractError(f"'{name}' has its matrices transposed; export the merged form")
        parameters |= _stacked(name, [layer[number] for number in sorted(layer)])
    return modules, parameters


def _stacked(name: str, layer: list[dict[str, Pair]]) -> dict[str, Pair]:
    """Return a layer's experts as the adapters of its stacked parameters."""
    found = {}
    if "gate_proj" in layer[0]:
        found[f"{name}.gate_up_proj"] = _stack(
            # Gate and up are one matrix there, as in Megatron, and have one matrix down to the rank.
            [
                Pair(one["gate_proj"].down, torch.cat([one["gate_proj"].up, one["up_proj"].up]))
                for one in layer
            ]
        )
    if "down_proj" in layer[0]:
        found[f"{name}.down_proj"] = _stack([one["down_proj"] for one in layer])
    return found


def _stack(pairs: list[Pair]) -> Pair:
    """Lay the experts' pairs as PEFT does: one after the other down to the ranks, interleaved up from them."""
    return Pair(
        torch.cat([pair.down for pair in pairs]),
        torch.stack([pair.up for pair in pairs], dim=-1).flatten(1),
    )


def _config(
    modules: Mapping[str, Pair],
    parameters: Mapping[str, Pair],
    skeleton: PreTrainedModel,
    arguments: TrainArguments,
) -> LoraConfig:
    every_module = [name for name, _ in skeleton.named_modules()]
    every_parameter = [name for name, _ in skeleton.named_parameters()]
    return LoraConfig(
        r=arguments.lora_r,
        lora_alpha=arguments.lora_alpha,
        # PEFT refuses dropout on parameters; nothing drops out of what is published.
        lora_dropout=0.0 if parameters else arguments.lora_dropout,
        target_modules=shortest(modules, every_module),
        target_parameters=shortest(parameters, every_parameter) or None,
        inference_mode=True,
    )


def shortest(chosen: Iterable[str], every: list[str]) -> list[str]:
    """Return ends of the names that match what was chosen and nothing else, where there are such; else the names."""
    names = set(chosen)
    found = set()
    for name in sorted(names):
        parts = name.split(".")
        ends = (".".join(parts[start:]) for start in range(len(parts) - 1, 0, -1))
        found.add(
            next(
                (
                    end
                    for end in ends
                    if {one for one in every if one == end or one.endswith(f".{end}")} <= names
                ),
                name,
            )
        )
    return sorted(found)


@torch.no_grad()
def _fill(adapted: PeftModel, pairs: Mapping[str, Pair]) -> None:
    """Put the pairs where PEFT wants them; every one must find its place, and every place its pair."""
    left = dict(pairs)
    for path, module in adapted.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        name = path.removeprefix("base_model.model.").replace(".base_layer", "")
        if isinstance(module, ParamWrapper):
            name = f"{name}.{module.parameter_name}"
        if name not in left:
            raise ContractError(f"PEFT adapts '{name}', which has no adapter")
        pair = left.pop(name)
        _set(module.lora_A["default"], pair.down, where=f"{name}.lora_A")
        _set(module.lora_B["default"], pair.up, where=f"{name}.lora_B")
    if left:
        raise ContractError(f"PEFT has no place for the adapters of {', '.join(sorted(left)[:3])}")


def _set(layer: Any, tensor: Tensor, *, where: str) -> None:
    expected, got = list(layer.weight.shape), list(tensor.shape)
    if got != expected:
        raise ContractError(f"'{where}': expected an adapter of shape {expected}, got {got}")
    layer.weight = nn.Parameter(tensor.contiguous(), requires_grad=False)
