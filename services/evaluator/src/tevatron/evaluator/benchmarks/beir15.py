"""BEIR-15: the 13 public BEIR sets, MS MARCO's dev queries, and CQADupStack's 12 forums as one unit.

Counts are those of the judgments that Anserini and the BEIR archive agree on. Touche is version 2, as in BEIR since 2021.
"""

from __future__ import annotations

from tevatron.evaluator.benchmarks.base import Benchmark, Dataset, Unit

FORUMS = {
    "android": (699, 1696),
    "english": (1570, 3765),
    "gaming": (1595, 2263),
    "gis": (885, 1114),
    "mathematica": (804, 1358),
    "physics": (1039, 1933),
    "programmers": (876, 1675),
    "stats": (652, 913),
    "tex": (2906, 5154),
    "unix": (1072, 1693),
    "webmasters": (506, 1395),
    "wordpress": (541, 744),
}
"""Forum to judged queries and relevant judgments."""


def _set(
    name: str,
    num_queries: int,
    num_relevant: int,
    *,
    split: str = "test",
    hub: str | None = None,
    files: tuple[str, ...] = (),
    drops_identical: bool = False,
) -> Dataset:
    return Dataset(
        name=name,
        split=split,
        num_queries=num_queries,
        num_relevant=num_relevant,
        drops_identical=drops_identical,
        hub_id=f"mteb/{hub or name}",
        files=(*files, f"qrels.beir-v1.0.0-{name}.{split}.txt"),
    )


SETS = (
    _set("arguana", 1406, 1406, drops_identical=True),
    _set("climate-fever", 1535, 4681),
    _set("dbpedia-entity", 400, 15286, hub="dbpedia"),
    _set("fever", 6666, 7937),
    _set("fiqa", 648, 1706),
    _set("hotpotqa", 7405, 14810),
    _set("nfcorpus", 323, 12334),
    _set("nq", 3452, 4201),
    _set("quora", 10000, 15675, drops_identical=True),
    _set("scidocs", 1000, 4928),
    _set("scifact", 300, 339),
    _set("trec-covid", 50, 24673),
    _set("webis-touche2020", 49, 932, hub="touche2020"),
    _set("msmarco", 6980, 7437, split="dev", files=("qrels.msmarco-passage.dev-subset.txt",)),
)
CQADUPSTACK = tuple(
    _set(f"cqadupstack-{forum}", *counts, files=(f"cqadupstack/{forum}/qrels/test.tsv",))
    for forum, counts in FORUMS.items()
)

BEIR15 = Benchmark(
    name="beir15",
    title="BEIR-15",
    datasets=(*SETS, *CQADUPSTACK),
    units=(
        *(Unit(dataset.name, (dataset.name,)) for dataset in SETS),
        Unit("cqadupstack", tuple(dataset.name for dataset in CQADUPSTACK)),
    ),
    columns=("ndcg@10", "recall@200", "ndcg@100"),
)
