"""LoRA on matrices that a rank has whole, in as few calls as it takes.

The bridge's adapters are Megatron's parallel layers, which on one rank is dozens of calls for two small products; and
the copies of a layer's one expert adapter meet in every pass, which all other ranks wait for. A mixture's GPU waits for
its host, so both count. Where a matrix is cut, or dropout is asked for, the bridge's own way stays.

Shapes: T tokens sorted by expert, E experts of this rank, I input size, O output size, R rank of the adapters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.core import parallel_state
from torch import Tensor, nn

from tevatron.trainer.program.backends.megatron.grouped import TorchGrouped, ends_of

_SHARED = re.compile(r".*\.mlp\.experts\.linear_fc[12]\.adapter\.linear_(?:in|out)\.weight")


class WholeLoRA(LoRA):  # type: ignore[misc]
    """The bridge's LoRA, with the modules below where the matrices are whole."""

    def transform(
        self, module: nn.Module, name: str | None = None, prefix: str | None = None
    ) -> Any:
        """Return the module with an adapter, if it is to have one."""
        made = super().transform(module, name, prefix)
        if type(made) is not LoRALinear or not _is_whole(made.adapter):
            return made
        kind = AdaptedExperts if isinstance(module, TorchGrouped) else AdaptedLinear
        return kind(made.to_wrap, made.adapter)


def _is_whole(adapter: Any) -> bool:
    group = getattr(adapter, "expert_tp_group", None) or adapter.tp_group
    return group.size() == 1 and isinstance(adapter.dropout, nn.Identity)


class AdaptedLinear(LoRALinear):  # type: ignore[misc]
    """A linear layer with an adapter: two products and a sum."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Return the layer's output with the adapter's, and the layer's bias if that is to be added later."""
        found, bias, normed = self.base_linear_forward(x, *args, **kwargs)
        if not self._adapter_enabled:
            return found, bias
        down_RI, up_OR = self.adapter.linear_in.weight, self.adapter.linear_out.weight
        hidden_TR = F.linear(normed.reshape(-1, normed.shape[-1]), down_RI)
        scale = self.adapter.alpha / self.adapter.dim
        added = F.linear(hidden_TR, up_OR).view_as(found)
        return torch.add(found, added, alpha=scale), bias


class AdaptedExperts(LoRALinear):  # type: ignore[misc]
    """Grouped experts with one adapter for all, or with one for each."""

    def forward(
        self, x: Tensor, tokens_per_expert: list[int], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the experts' outputs with the adapters', [T, O], and no bias."""
        experts: TorchGrouped = self.to_wrap
        if not self._adapter_enabled or not experts.is_one_product(x):
            found: tuple[Tensor, Tensor | None] = super().forward(
                x, tokens_per_expert, *args, **kwargs
            )
            return found
        down, up = self.adapter.linear_in.weight, self.adapter.linear_out.weight
        scale = self.adapter.alpha / self.adapter.dim
        ends_E = ends_of(tokens_per_expert, x.device)
        return adapted_product(x, experts.stacked(), down, up * scale, ends_E), None


def adapted_product(
    tokens_TI: Tensor, weight_EOI: Tensor, down: Tensor, up: Tensor, ends_E: Tensor
) -> Tensor:
    """Return each expert's tokens times its frozen matrix plus the product with an adapter's two, [T, O].

    Args:
        down: [R, I] of an adapter that all experts share, or [E, R, I].
        up: [O, R] or [E, O, R].
        ends_E: Where each expert's tokens end; the last one is T.
    """
    found: Tensor = _AdaptedProduct.apply(tokens_TI, weight_EOI, down, up, ends_E)  # type: ignore[no-untyped-call]
    return found


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens_TI: Tensor, weight_EOI: Tensor, down: Tensor, up: Tensor, ends_E: Tensor
    ) -> Tensor:
        hidden_TR = _product(down, ends_E)(tokens_TI, down.mT)
        ctx.save_for_backward(tokens_TI, weight_EOI, down, up, ends_E, hidden_TR)
        found_TO = F.grouped_mm(tokens_TI, weight_EOI.mT, offs=ends_E)
        return _add_product(found_TO, hidden_TR, up.mT, ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor, Tensor, None]:
        tokens_TI, weight_EOI, down, up, ends_E, hidden_TR = ctx.saved_tensors
        product = _product(down, ends_E)
        grad_TO = grads[0].contiguous()
        grad_TR = product(grad_TO, up)
        grad_TI = F.grouped_mm(grad_TO, weight_EOI, offs=ends_E)
        _add_product(grad_TI, grad_TR, down, ends_E)
        return grad_TI, None, product(grad_TR.t(), tokens_TI), product(grad_TO.t(), hidden_TR), None


def _product(adapter: Tensor, ends_E: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return how tokens meet an adapter's matrices: one that all experts share, or each expert's own."""
    return torch.mm if adapter.dim() == 2 else partial(F.grouped_mm, offs=ends_E)


def _add_product(found: Tensor, left: Tensor, adapter: Tensor, ends_E: Tensor) -> Tensor:
    if adapter.dim() == 2:
        return found.addmm_(left, adapter)
    return found.add_(_product(adapter, ends_E)(left, adapter))


def shared_adapters(chunk: Any) -> list[nn.Parameter]:
    """Return the parameters of which every expert-parallel rank has a copy."""
    return [parameter for _, parameter in _shared(chunk)]


def _shared(chunk: Any) -> list[tuple[str, nn.Parameter]]:
    return [
        (name, parameter)
        for name, parameter in chunk.named_parameters()
        if _SHARED.fullmatch(name) and parameter.dim() == 2
    ]


def meet_once_a_step(chunk: Any) -> None:
    """Take away what has the copies of an adapter meet in every pass: `sum_gradients` has them meet once."""
    for name, parameter in _shared(chunk):
        # The bridge's hook is on the tensor; a new one has none.
        fresh = nn.Parameter(parameter.data, requires_grad=parameter.requires_grad)
        vars(fresh).update(vars(parameter))
        owner, _, attribute = name.rpartition(".")
        setattr(chunk.get_submodule(owner), attribute, fresh)


def sum_gradients(shared: list[nn.Parameter]) -> None:
    """Add a step's gradients of shared adapters up over their copies, as if all tokens had met one of them."""
    group = parallel_state.get_expert_model_parallel_group()
    if group.size() == 1 or not shared:
        return
    found = [vars(parameter)["main_grad"] for parameter in shared]
    flat = torch.cat([grad.view(-1) for grad in found])
    dist.all_reduce(flat, group=group)
    for grad, part in zip(found, torch.split(flat, [grad.numel() for grad in found]), strict=True):
        grad.copy_(part.view_as(grad))
