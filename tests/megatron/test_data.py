"""Replicas get about as many tokens as each other, whoever drew the queries."""

import pytest
from tests.megatron.ranks import on_ranks

from tevatron.core.layout import Layout
from tevatron.trainer.program.backends.megatron.data import share_evenly
from tevatron.trainer.program.backends.megatron.parallel import join_ranks
from tevatron.trainer.program.data.groups import Group
from tevatron.trainer.program.settings import RankEnvironment


def shared(drawn: list[list[int]], tensor: int) -> list[list[list[int]]]:
    """Return the prompts that this rank trains on, where each replica drew groups of so many tokens."""
    environment = RankEnvironment.read()
    layout = Layout(world=environment.world_size, tensor=tensor)
    ranks = join_ranks(layout, environment, seed=1)
    groups = [
        # A group's first token says who drew it.
        Group(
            prompts=[[ranks.data_rank], [0] * (length - 1)],
            teacher=[1.0, 0.0],
            num_groups=sum(map(len, drawn)),
            num_truncated=place,
        )
        for place, length in enumerate(drawn[ranks.data_rank])
    ]
    return [[[len(group.prompts[1]) + 1], group.prompts[0]] for group in share_evenly(groups)]


@pytest.mark.parametrize(
    ("drawn", "tensor", "expected"),
    [
        ([[100, 90], [20, 10]], 1, [[110], [110]]),
        ([[100, 90], [20, 10]], 2, [[110], [110], [110], [110]]),
        ([[50], []], 1, [[50], [0]]),
        ([[7, 7, 7]], 1, [[21]]),
    ],
    ids=["two replicas", "of two ranks each", "one group in all", "one replica"],
)
def test_replicas_share_a_step_evenly(
    drawn: list[list[int]], tensor: int, expected: list[list[int]]
):
    found = on_ranks(len(expected), shared, drawn, tensor)
    assert [[sum(length for (length,), _ in rank)] for rank in found] == expected
    replicas = found[::tensor]
    assert all(found[place] == replicas[place // tensor] for place in range(len(found)))
    got = [(who, length) for replica in replicas for (length,), (who,) in replica]
    every = [(who, length) for who, lengths in enumerate(drawn) for length in lengths]
    assert sorted(got) == sorted(every)
