"""Which evaluation is the best, and how long ago that is."""

import pytest

from tevatron.trainer.program.best import Best


def take(metric: str, values: list[float]) -> list[tuple[int | None, float, int]]:
    best, seen = Best(), []
    for step, value in enumerate(values, 1):
        best.take(step, {f"eval_{metric}": value, "eval_other": -1.0}, metric=metric)
        seen.append((best.step, best.value, best.num_worse))
    return seen


def test_the_lowest_loss_is_the_best():
    assert take("loss", [0.5, 0.7, 0.4]) == [(1, 0.5, 0), (1, 0.5, 1), (3, 0.4, 0)]


def test_the_highest_ndcg_is_the_best():
    assert take("ndcg@10", [0.5, 0.4, 0.3, 0.6]) == [
        (1, 0.5, 0), (1, 0.5, 1), (1, 0.5, 2), (4, 0.6, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("metric", ["loss", "ndcg@10"])
def test_of_two_alike_the_earlier_one_is_the_best(metric):
    assert take(metric, [0.5, 0.5]) == [(1, 0.5, 0), (1, 0.5, 1)]


def test_a_worst_first_value_is_the_best_so_far():
    assert take("ndcg@10", [0.0, 0.0]) == [(1, 0.0, 0), (1, 0.0, 1)]
