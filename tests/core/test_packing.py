import math
import random
import time

import pytest

from tevatron.core.packing import pack, spread, waste


def _lengths(count, seed=0):
    """Log-normal, mean about 167, at most 512: the lengths of RLHN's pairs."""
    draw = random.Random(seed)
    sigma = 0.6
    mu = math.log(167) - sigma**2 / 2
    return [min(512, max(20, round(draw.lognormvariate(mu, sigma)))) for _ in range(count)]


def _filled(lengths, bins):
    return [sum(lengths[index] for index in indices) for indices in bins]


def test_every_item_is_placed_once_and_no_bin_is_over_the_budget():
    lengths = _lengths(5000)
    bins = pack(lengths, max_tokens=8192)
    assert sorted(index for indices in bins for index in indices) == list(range(5000))
    assert max(_filled(lengths, bins)) <= 8192


def test_literal_small_case():
    assert pack([6, 5, 4, 3, 2], max_tokens=10) == [[0, 2], [1, 3, 4]]


def test_bins_are_level_where_the_budget_allows_it():
    assert sorted(_filled([4, 4, 4, 4, 4, 4], pack([4, 4, 4, 4, 4, 4], max_tokens=20))) == [12, 12]


def test_best_fit_is_kept_where_leveling_goes_over_the_budget():
    lengths = [7, 6, 5, 5, 4, 3]
    bins = pack(lengths, max_tokens=10)
    assert _filled(lengths, bins) == [10, 10, 10]


def test_item_over_the_budget_is_alone():
    assert pack([5, 30, 5], max_tokens=10) == [[0, 2], [1]]


def test_nothing_to_pack():
    assert pack([], max_tokens=10) == []
    assert waste([], []) == 0.0


def test_zero_length_and_exact_fit():
    assert pack([10, 0], max_tokens=10) in ([[0, 1]], [[0], [1]])
    assert pack([10, 10], max_tokens=10) == [[0], [1]]


def test_equal_input_gives_equal_output():
    lengths = _lengths(1000, seed=3)
    assert pack(lengths, max_tokens=4096) == pack(list(lengths), max_tokens=4096)


@pytest.mark.parametrize("count", [256, 512, 1024, 4096, 100_000])
def test_waste_is_under_three_percent_at_8k(count):
    lengths = _lengths(count, seed=count)
    bins = pack(lengths, max_tokens=8192)
    assert waste(lengths, bins) < 0.03
    assert len(bins) <= math.ceil(sum(lengths) / 8192) + 1


def test_packs_a_hundred_thousand_lengths_quickly():
    lengths = _lengths(100_000)
    start = time.perf_counter()
    pack(lengths, max_tokens=8192)
    assert time.perf_counter() - start < 5


def test_whole_groups_are_level_within_one_percent():
    draw = random.Random(3)
    for _ in range(20):
        groups = [
            sum(min(512, round(draw.lognormvariate(4.94, 0.6))) for _ in range(8))
            for _ in range(64)
        ]
        bins = pack(groups, max_tokens=8192)
        assert sorted(index for indices in bins for index in indices) == list(range(64))
        assert waste(groups, bins) < 0.01


def test_many_long_items_are_levelled_quickly():
    draw = random.Random(4)
    lengths = [draw.randint(500, 3000) for _ in range(50_000)]
    started = time.process_time()
    pack(lengths, max_tokens=8192)
    assert time.process_time() - started < 10


def test_spread_literal_small_case():
    assert spread([100, 90, 20, 10], num_bins=2) == [[0, 3], [1, 2]]
    assert spread([5], num_bins=3) == [[0], [], []]
    assert spread([], num_bins=2) == [[], []]


def test_eight_replicas_of_sixteen_queries_are_within_a_hundredth():
    lengths = [sum(_lengths(8, seed)) for seed in range(128)]
    filled = _filled(lengths, spread(lengths, num_bins=8))
    assert max(filled) <= 1.01 * sum(filled) / 8
