"""One gather in place of Megatron's many pieces, and one product for all frozen experts: the same numbers."""

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs

from tevatron.trainer.program.backends.megatron.dispatch import sort_chunks
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
