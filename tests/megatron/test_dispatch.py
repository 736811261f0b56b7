"""Gathers in place of Megatron's many pieces, and one product for all frozen experts: the same numbers."""

from pathlib import Path

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import permute, sort_chunks_by_idxs, unpermute
from tests.megatron.ranks import on_ranks
from tests.megatron.runs import arguments, model_folder, scores_and_steps

from tevatron.trainer.program.backends.megatron.adapted import adapted_product
from tevatron.trainer.program.backends.megatron.dispatch import _permute, _unpermute, sort_chunks
from tevatron.trainer.program.backends.megatron.grouped import _FrozenProduct

SIZES = torch.tensor([3, 0, 5, 1, 0, 4])


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [0, 3, 1, 4, 2, 5], [5, 4, 3, 2, 1, 0]])
def test_chunks_are_sorted_as_megatron_sorts_them(order: list[int]):
    tokens = torch.randn(13, 4, requires_grad=True)
    probs = torch.randn(13, requires_grad=True)
    factor = torch.randn(13, 4)
    found = []
    for sort in (sort_chunks_by_idxs, sort_chunks):
        moved, moved_probs = sort(tokens, SIZES, torch.tensor(order), probs)
        assert moved_probs is not None
        loss = (moved * moved_probs[:, None] * factor).sum()
        found.append((moved, moved_probs, *torch.autograd.grad(loss, [tokens, probs])))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_tokens_are_copied_and_summed_as_megatron_does_it():
    tokens = torch.randn(7, 4, requires_grad=True)
    chosen = torch.rand(7, 6).topk(2).indices
    routing = torch.zeros(7, 6, dtype=torch.bool).scatter_(1, chosen, True)
    probs = torch.rand(7, 6, requires_grad=True)
    factor, weight = torch.randn(7, 4), torch.randn(14, 4)
    found = []
    for spread, join in ((permute, unpermute), (_permute, _unpermute)):
        copies, copy_probs, places, *_ = spread(tokens, routing, probs=probs, num_out_tokens=14)
        joined = join(copies * weight * copy_probs[:, None], places, tokens.shape)
        gradients = torch.autograd.grad((joined * factor).sum(), [tokens, probs])
        found.append((copies, copy_probs, joined, *gradients))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_with_adapters_are_five_products(dtype: torch.dtype):
    tokens = torch.randn(13, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(6, 32, 16, dtype=dtype)
    down = torch.randn(6, 8, 16, dtype=dtype, requires_grad=True)
    up = torch.randn(6, 32, 8, dtype=dtype, requires_grad=True)
    factor = torch.randn(13, 32, dtype=dtype)
    found = adapted_product(tokens, weight, down, up, SIZES.cumsum(0).int())
    parts = zip(tokens.split(SIZES.tolist()), weight, down, up, strict=True)
    expected = torch.cat([part @ whole.T + part @ one.T @ two.T for part, whole, one, two in parts])
    tolerance = {"rtol": 0.05, "atol": 0.5} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(found, expected, **tolerance)
    wanted = torch.autograd.grad((expected * factor).sum(), [tokens, down, up])
    gotten = torch.autograd.grad((found * factor).sum(), [tokens, down, up])
    for one, other in zip(gotten, wanted, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


def test_frozen_experts_are_one_product():
    tokens = torch.randn(13, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(6, 32, 16, dtype=torch.bfloat16)
    factor = torch.randn(13, 32, dtype=torch.bfloat16)
    parts = zip(tokens.split(SIZES.tolist()), weight, strict=True)
    expected = torch.cat([part @ matrix.T for part, matrix in parts])
    found = _FrozenProduct.apply(tokens, weight, SIZES.cumsum(0).int())
    torch.testing.assert_close(found, expected)
    (wanted,) = torch.autograd.grad((expected * factor).sum(), tokens)
    (gotten,) = torch.autograd.grad((found * factor).sum(), tokens)
    torch.testing.assert_close(gotten, wanted)


def test_frozen_experts_in_bf16_are_stacked_and_give_what_one_by_one_gives(tmp_path: Path):
    folder = model_folder(tmp_path / "qwen3_moe", "qwen3_moe")
    options = arguments(
        (1, 1, 1, 1), use_lora=True, lora_target_groups=["moe_experts"], dtype="bfloat16"
    )
    found = on_ranks(1, scores_and_steps, folder, options, 2)
    exact = on_ranks(
        1, scores_and_steps, folder, options.model_copy(update={"dtype": "float32"}), 2
    )
    assert found[0][0] == pytest.approx(exact[0][0], abs=0.1)
    for one, other in zip(found[0][1], exact[0][1], strict=True):
        assert one == pytest.approx(other, rel=0.05)
