"""A selection of MTEB's English sets: those that rerank given candidates, and the retrieval of MTEB(eng, v2).

Names and counts are MTEB's own; sets that it takes over from BEIR are BEIR's entries. The hub has the others as parquet
only: export them as BEIR folders.
"""

from __future__ import annotations

from tevatron.evaluator.benchmarks.base import Benchmark, Dataset
from tevatron.evaluator.benchmarks.beir15 import BEIR15

MTEB_RERANKING = Benchmark(
    name="mteb-reranking",
    title="MTEB reranking",
    datasets=(
        Dataset(name="AskUbuntuDupQuestions", num_queries=361, num_relevant=1975),
        Dataset(name="SciDocsRR", num_queries=3978, num_relevant=19599),
        Dataset(name="StackOverflowDupQuestions", num_queries=2992, num_relevant=3467),
    ),
    columns=("map@1000", "mrr@10", "ndcg@10"),
)
MTEB_RETRIEVAL = Benchmark(
    name="mteb-retrieval",
    title="MTEB(eng, v2) retrieval",
    datasets=(
        *(
            BEIR15.dataset(name)
            for name in (
                "arguana",
                "cqadupstack-gaming",
                "cqadupstack-unix",
                "fiqa",
                "scidocs",
                "trec-covid",
            )
        ),
        Dataset(name="ClimateFEVERHardNegatives", num_queries=1000, num_relevant=3048),
        Dataset(name="FEVERHardNegatives", num_queries=1000, num_relevant=1171),
        Dataset(name="HotpotQAHardNegatives", num_queries=1000, num_relevant=2000),
        Dataset(
            name="Touche2020Retrieval.v3",
            num_queries=49,
            num_relevant=1712,
            hub_id="mteb/webis-touche2020-v3",
        ),
    ),
    columns=("ndcg@10", "recall@100"),
)
