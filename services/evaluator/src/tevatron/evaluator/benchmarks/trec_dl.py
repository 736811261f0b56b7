"""TREC's Deep Learning tracks, passage ranking: graded 0 to 3, where binary metrics take grade 2 as relevant."""

from __future__ import annotations

from tevatron.evaluator.benchmarks.base import Benchmark, Dataset


def _track(year: str, num_queries: int, num_relevant: int) -> Benchmark:
    track = Dataset(
        name=f"dl{year}",
        num_queries=num_queries,
        num_relevant=num_relevant,
        relevance_level=2,
        files=(f"qrels.dl{year}-passage.txt", f"20{year}qrels-pass.txt"),
    )
    return Benchmark(
        name=f"dl{year}",
        title=f"TREC DL 20{year}",
        datasets=(track,),
        columns=("ndcg@10", "map@100", "recall@100", "mrr@10"),
    )


DL19 = _track("19", 43, 4102)
DL20 = _track("20", 54, 3606)
