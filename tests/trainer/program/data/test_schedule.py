import pytest

from tevatron.trainer.program.data.sampling import Sampling
from tevatron.trainer.program.data.schedule import Schedule

SAMPLING = Sampling(seed=7, group_size=2)


def schedule(**changes):
    return Schedule(
        **{
            "num_rows": 13,
            "micro_batch": 4,
            "num_micro_batches": 1,
            "num_ranks": 1,
            "num_epochs": 2.0,
            "max_steps": -1,
            **changes,
        }
    )


@pytest.mark.parametrize(
    ("changes", "per_epoch", "total"),
    [
        ({}, 4, 8),
        ({"num_epochs": 0.5}, 4, 2),
        ({"max_steps": 3}, 4, 3),
        ({"num_rows": 12}, 3, 6),
        ({"num_ranks": 2, "num_micro_batches": 2}, 1, 2),
    ],
)
def test_steps(changes, per_epoch, total):
    assert schedule(**changes).steps_per_epoch == per_epoch
    assert schedule(**changes).total_steps == total


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch": 2, "num_micro_batches": 2},
        {"micro_batch": 1, "num_micro_batches": 2, "num_ranks": 2},
        {"micro_batch": 1, "num_ranks": 4},
    ],
)
def test_a_step_has_the_same_rows_however_it_is_cut(changes):
    one = schedule(**changes)
    steps = [set() for _ in range(one.steps_per_epoch)]
    for rank in range(one.num_ranks):
        batches = list(one.micro_batches(SAMPLING, epoch=1, rank=rank))
        assert len(batches) == one.steps_per_epoch * one.num_micro_batches
        for place, batch in enumerate(batches):
            steps[place // one.num_micro_batches].update(draw.row for draw in batch)
            assert all(len(batch) <= one.micro_batch for batch in batches)
    order = SAMPLING.order(13, epoch=1)
    assert steps == [set(order[0:4]), set(order[4:8]), set(order[8:12]), set(order[12:])]


def test_every_draw_knows_the_groups_of_its_whole_step():
    one = schedule(micro_batch=1, num_ranks=4)
    draws = [
        draw
        for rank in range(4)
        for b in one.micro_batches(SAMPLING, epoch=0, rank=rank)
        for draw in b
    ]
    assert sorted(draw.num_groups for draw in draws) == [1] + [4] * 12
