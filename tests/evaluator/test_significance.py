import numpy as np
import pytest
from scipy import stats

from tevatron.core.errors import InputError
from tevatron.evaluator.significance import NUM_SWAPS, compare_pairs, holm


def pair(seed, size, shift):
    random = np.random.default_rng(seed)
    theirs = random.random(size)
    ours = np.clip(theirs + random.normal(shift, 0.1, size), 0, 1)
    return tuple({f"q{n}": float(x) for n, x in enumerate(side)} for side in (ours, theirs))


@pytest.mark.parametrize(("size", "shift"), [(5, 0.05), (12, 0.0), (300, 0.01), (2000, 0.0)])
def test_t_test_is_scipys_paired_one(size, shift):
    ours, theirs = pair(1, size, shift)
    expected = stats.ttest_rel(list(ours.values()), list(theirs.values())).pvalue
    assert compare_pairs(ours, theirs).t_test == pytest.approx(expected, rel=1e-9)


def exact(ours, theirs, **options):
    def mean_difference(x, y, axis):
        return np.mean(x - y, axis=axis)

    samples = (np.array(list(ours.values())), np.array(list(theirs.values())))
    return stats.permutation_test(
        samples, mean_difference, permutation_type="samples", **options
    ).pvalue


def test_randomisation_of_few_queries_is_scipys_exact_one():
    ours, theirs = pair(2, 11, 0.05)
    assert compare_pairs(ours, theirs).randomisation == pytest.approx(exact(ours, theirs))


def test_randomisation_of_many_queries_is_near_scipys():
    ours, theirs = pair(3, 60, 0.02)
    found = compare_pairs(ours, theirs).randomisation
    expected = exact(ours, theirs, n_resamples=20_000, rng=np.random.default_rng(0))
    assert 0.01 < expected < 0.5
    assert found == pytest.approx(expected, abs=0.015)


def test_clear_differences_have_the_least_p_value_that_the_swaps_allow():
    ours, theirs = pair(4, 500, 0.2)
    assert compare_pairs(ours, theirs).randomisation == 1 / (NUM_SWAPS + 1)
    assert compare_pairs(ours, theirs).t_test < 1e-50


def test_the_same_values_do_not_differ_and_the_order_does_not_count():
    ours, theirs = pair(5, 40, 0.03)
    assert compare_pairs(ours, ours) == (1.0, 1.0)
    turned = dict(reversed(ours.items()))
    assert compare_pairs(turned, theirs) == compare_pairs(ours, theirs)
    assert compare_pairs(theirs, ours).randomisation == compare_pairs(ours, theirs).randomisation


def test_a_constant_gain_and_a_single_query():
    assert compare_pairs(dict.fromkeys("abcde", 1.0), dict.fromkeys("abcde", 0.5)) == (
        0.0,
        2 / 2**5,
    )
    assert compare_pairs({"a": 1.0}, {"a": 0.0}) == (1.0, 1.0)


def test_other_queries_are_refused():
    with pytest.raises(InputError, match="got 2 and 1: only one side has 'b'"):
        compare_pairs({"a": 1.0, "b": 0.5}, {"a": 1.0})


def test_holm_by_hand():
    # .01 * 4; .02 * 3; .03 * 2, but not less than the one before; .04
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []
