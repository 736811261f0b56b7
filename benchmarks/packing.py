"""Tokens wasted by batching: packed by token budget beside rows padded to the longest of the micro batch.

Lengths as RLHN's: log-normal, mean 167 tokens, at most 512; groups of 8. `ours` counts as waste what the other packed
passes of a micro batch fall short of the fullest one, although nothing is computed there: prompts as the scorer packs
them, and whole groups as training does. `reference` is the padding that its collator makes (longest of the micro
batch, up to a multiple of 16).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys

from record import row, write_rows

from tevatron.core.packing import pack, waste

GROUP, BUDGET, MEAN, LONGEST, SHORTEST = 8, 8192, 167, 512, 20
SIGMA = 0.6
TARGET = 0.03
MULTIPLE = 16


def main() -> None:
    """Measure and write benchmarks/results/packing.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", type=int, default=100, help="micro batches that the mean is taken over"
    )
    seeds = range(parser.parse_args().seeds)
    rows = []
    worst = 0.0
    for queries, method, how, measure in (
        (4, "reference", "padded to the longest", _padded),
        (64, "reference", "padded to the longest", _padded),
        (64, "ours", f"prompts packed to {BUDGET}", _packed_prompts),
        (64, "ours", f"whole groups packed to {BUDGET}", _packed_groups),
        (256, "ours", f"whole groups packed to {BUDGET}", _packed_groups),
    ):
        shares = [measure(_groups(queries, seed)) for seed in seeds]
        layout = f"{queries} queries x {GROUP} a micro batch"
        layout += f", {how}"
        value = statistics.fmean(shares)
        if measure is _packed_prompts:
            worst = max(worst, *shares)
        rows.append(
            row(
                name="tokens wasted by batching",
                method=method,
                layout=layout,
                value=round(100 * value, 2),
                unit="% of tokens",
                worst=round(100 * max(shares), 2),
            )
        )
        print(f"{method:<10} {layout:<62} {100 * value:6.2f} %, worst {100 * max(shares):.2f} %")
    print(write_rows("packing", rows))
    if worst >= TARGET:
        sys.exit(f"expected less than {TARGET:.0%} of every batch of prompts, got {worst:.2%}")


def _groups(count: int, seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    mu = math.log(MEAN) - SIGMA**2 / 2
    lengths = [
        min(LONGEST, max(SHORTEST, round(draw.lognormvariate(mu, SIGMA))))
        for _ in range(count * GROUP)
    ]
    return [lengths[start : start + GROUP] for start in range(0, len(lengths), GROUP)]


def _packed_prompts(groups: list[list[int]]) -> float:
    lengths = [length for group in groups for length in group]
    return waste(lengths, pack(lengths, max_tokens=BUDGET))


def _packed_groups(groups: list[list[int]]) -> float:
    lengths = [sum(group) for group in groups]
    return waste(lengths, pack(lengths, max_tokens=BUDGET))


def _padded(groups: list[list[int]]) -> float:
    lengths = [length for group in groups for length in group]
    width = -(-max(lengths) // MULTIPLE) * MULTIPLE
    return 1 - sum(lengths) / (width * len(lengths))


if __name__ == "__main__":
    main()
