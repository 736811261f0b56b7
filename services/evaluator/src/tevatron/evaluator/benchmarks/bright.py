"""BRIGHT: reasoning-intensive retrieval in 12 sets, each a unit.

Some of its queries name documents that must not count for them (`exclude.<name>.txt`). Counts are those of the hub's
revision that MTEB pins; of the two TheoremQA sets the revisions differ, so that nothing is expected of them.
"""

from __future__ import annotations

from tevatron.evaluator.benchmarks.base import Benchmark, Dataset

_COUNTS: dict[str, tuple[int | None, int | None]] = {
    "biology": (103, 374),
    "earth-science": (116, 609),
    "economics": (103, 823),
    "psychology": (101, 742),
    "robotics": (101, 553),
    "stackoverflow": (117, 819),
    "sustainable-living": (108, 604),
    "leetcode": (142, 262),
    "pony": (112, 2519),
    "aops": (111, 524),
    "theoremqa-questions": (None, None),
    "theoremqa-theorems": (None, None),
}
_EXCLUDING = frozenset({"leetcode", "aops", "theoremqa-questions", "theoremqa-theorems"})


def _set(name: str, num_queries: int | None, num_relevant: int | None) -> Dataset:
    return Dataset(
        name=f"bright-{name}",
        num_queries=num_queries,
        num_relevant=num_relevant,
        drops_excluded=name in _EXCLUDING,
        files=(
            f"bright/{name}/qrels/test.tsv",
            f"bright/{name.replace('-', '_')}/qrels/test.tsv",
            f"qrels.bright-{name}.fixed.txt",
        ),
    )


BRIGHT = Benchmark(
    name="bright",
    title="BRIGHT",
    datasets=tuple(_set(name, *counts) for name, counts in _COUNTS.items()),
    columns=("ndcg@10", "recall@100"),
)
