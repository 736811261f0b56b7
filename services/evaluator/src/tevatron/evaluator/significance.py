"""Paired tests between two systems' values of the same queries, and Holm's correction. Knows numbers only.

Two tests, both two-sided: Student's paired t-test, and Fisher's randomisation test, which swaps the two systems' values
query by query: every combination of swaps where there are few queries, else 10,000 drawn from a fixed seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tevatron.core.errors import InputError

ALPHA = 0.05
NUM_SWAPS = 10_000
SEED = 20_261_129
_MAX_EXACT = 13
"""Up to so many queries that differ, every combination is looked at (8,192)."""
_BATCH_CELLS = 4_000_000


class Comparison(NamedTuple):
    """P values of one system against another."""

    t_test: float
    randomisation: float


def compare_pairs(ours: Mapping[str, float], theirs: Mapping[str, float]) -> Comparison:
    """Test whether two systems differ on the same queries.

    Args:
        ours: Query to value of one system.
        theirs: Query to value of the other.

    Raises:
        InputError: They were not evaluated on the same queries.
    """
    if ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        raise InputError(
            f"a paired test needs the same queries on both sides, got {len(ours)} and {len(theirs)}: only one side has "
            f"{', '.join(map(repr, odd[:3]))}"
        )
    # In the order of the ids: the result does not depend on the order in which they came.
    differences = np.array([ours[qid] - theirs[qid] for qid in sorted(ours)], dtype=np.float64)
    return Comparison(_t_test(differences), _randomisation(differences))


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p values for that there are several (Holm 1979); the order stays."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    corrected = [0.0] * len(p_values)
    least = 0.0
    for done, place in enumerate(order):
        least = max(least, min(1.0, (len(p_values) - done) * p_values[place]))
        corrected[place] = least
    return corrected


def _t_test(differences: npt.NDArray[np.float64]) -> float:
    if len(differences) < 2 or not differences.any():
        return 1.0
    if np.ptp(differences) == 0:
        return 0.0  # all differ by the same: no spread to divide by
    # Its import takes half a second, which nobody else should wait for.
    from scipy.stats import ttest_1samp

    return float(ttest_1samp(differences, 0.0).pvalue)


def _randomisation(differences: npt.NDArray[np.float64]) -> float:
    # A query without a difference changes nothing when it is swapped.
    sizes = np.abs(differences[differences != 0])
    if not len(sizes):
        return 1.0
    # Sums of the same numbers in another order differ in the last bits.
    observed = abs(differences.sum()) - 1e-9
    if len(sizes) <= _MAX_EXACT:
        places = np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes))[None, :]
        return float(np.mean(np.abs((1 - 2 * (places & 1)) @ sizes) >= observed))
    random = np.random.default_rng(SEED)
    batch = max(1, _BATCH_CELLS // len(sizes))
    extreme = done = 0
    while done < NUM_SWAPS:
        rows = min(batch, NUM_SWAPS - done)
        signs = 1.0 - 2.0 * random.integers(0, 2, (rows, len(sizes)), dtype=np.int8)
        extreme += int(np.count_nonzero(np.abs(signs @ sizes) >= observed))
        done += rows
    # The order that was seen is one of those possible.
    return (extreme + 1) / (NUM_SWAPS + 1)
