"""Tokens that every rank gathers, and one product for all frozen experts: the numbers of Megatron's own dispatcher."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from tests.megatron.ranks import on_ranks
from tests.megatron.runs import arguments, model_folder, scores_and_steps

from tevatron.core.layout import Layout
from tevatron.trainer.program.backends.megatron.adapted import adapted_product
from tevatron.trainer.program.backends.megatron.dispatch import GatheringDispatcher
from tevatron.trainer.program.backends.megatron.grouped import _FrozenProduct
from tevatron.trainer.program.backends.megatron.parallel import join_ranks
from tevatron.trainer.program.settings import RankEnvironment

SIZES = torch.tensor([3, 0, 5, 1, 0, 4])
NUM_EXPERTS = 6
HIDDEN = 4


def dispatched(num_tokens: list[int], chosen: list[int]) -> list[list[np.ndarray]]:
    """Return, for Megatron's dispatcher and for ours, what this rank's experts get, the layer's output and gradients."""
    environment = RankEnvironment.read()
    world, rank = environment.world_size, environment.rank
    join_ranks(Layout(world=world, expert=world), environment, seed=1)
    own = NUM_EXPERTS // world
    layer = SimpleNamespace(
        config=SimpleNamespace(
            moe_permute_fusion=False,
            num_moe_experts=NUM_EXPERTS,
            moe_pad_expert_input_to_capacity=False,
            moe_expert_capacity_factor=None,
            moe_router_padding_for_quantization=False,
            moe_router_topk=2,
            cuda_graph_impl="none",
        ),
        local_expert_indices=list(range(rank * own, (rank + 1) * own)),
    )
    megatron = MoEAlltoAllTokenDispatcher(
        own, layer.local_expert_indices, layer.config, get_default_pg_collection()
    )
    draw = torch.Generator().manual_seed(rank)
    count = num_tokens[rank]
    tokens = torch.randn(count, 1, HIDDEN, generator=draw, requires_grad=True)
    options = torch.tensor(chosen)
    picked = options[torch.rand(count, len(options), generator=draw).topk(2).indices]
    routed = torch.zeros(count, NUM_EXPERTS, dtype=torch.bool).scatter_(1, picked, True)
    probs = torch.rand(count, NUM_EXPERTS, generator=draw, requires_grad=True)
    factor = torch.randn(count, 1, HIDDEN, generator=draw)
    matrices = torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(9))[
        rank * own : (rank + 1) * own
    ]
    found = []
    for dispatcher in (megatron, GatheringDispatcher(layer)):
        sent = dispatcher.token_dispatch(*dispatcher.dispatch_preprocess(tokens, routed, probs))
        copies, sizes, weights = dispatcher.dispatch_postprocess(*sent)
        parts = zip(copies.split(sizes.tolist()), matrices, strict=True)
        made = torch.cat([part @ matrix for part, matrix in parts]) * weights[:, None]
        joined = dispatcher.token_combine(dispatcher.combine_preprocess(made))
        output = dispatcher.combine_postprocess(joined)
        gradients = torch.autograd.grad((output * factor).sum(), [tokens, probs])
        found.append([one.detach().numpy() for one in (copies, sizes, weights, output, *gradients)])
    return found


@pytest.mark.parametrize(
    ("num_tokens", "chosen"),
    [
        ([7], [0, 1, 2, 3, 4, 5]),
        ([7, 7], [0, 1, 2, 3, 4, 5]),
        ([5, 9], [0, 1, 3, 5]),
        ([9, 1], [3, 4]),
        ([3, 8, 1], [0, 2, 5]),
    ],
    ids=["one", "alike", "shorter", "no tokens for the first", "three"],
)
def test_tokens_are_dispatched_as_megatron_does_it(num_tokens: list[int], chosen: list[int]):
    for found in on_ranks(len(num_tokens), dispatched, num_tokens, chosen):
        for expected, gotten in zip(*found, strict=True):
            torch.testing.assert_close(gotten, expected)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_with_adapters_are_five_products(dtype: torch.dtype, shared: bool):
    tokens = torch.randn(13, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(6, 32, 16, dtype=dtype)
    number = () if shared else (6,)
    down = torch.randn(*number, 8, 16, dtype=dtype, requires_grad=True)
    up = torch.randn(*number, 32, 8, dtype=dtype, requires_grad=True)
    factor = torch.randn(13, 32, dtype=dtype)
    found = adapted_product(tokens, weight, down, up, SIZES.cumsum(0).int())
    pairs = (one.expand(6, -1, -1) for one in (down, up))
    parts = zip(tokens.split(SIZES.tolist()), weight, *pairs, strict=True)
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
