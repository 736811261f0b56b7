"""What the demo reaches on examples/sample: nDCG@10 and Recall@10 over three seeds, beside a random order.

    make bench-demo          (some ten minutes on two cores)

One stack, one request: BM25, the untrained model, and for each seed a training and its evaluation. The random order is
of the same BM25 candidates, in the mean of 1000 draws.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from record import row, write_rows

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import demo  # noqa: E402

from tevatron.core.contracts.jobs import EvalJob, From, JobGroup  # noqa: E402
from tevatron.core.formats.beir import BeirFolder  # noqa: E402
from tevatron.evaluator.bm25 import open_index, search_all  # noqa: E402
from tevatron.evaluator.metrics import evaluate, parse_metric, rank  # noqa: E402

SEEDS = (1, 2, 3)
DRAWS = 1000
METRICS = ("ndcg@10", "recall@10")
MODEL = "SmolLM2-135M-Instruct"


def main() -> None:
    """Measure and write benchmarks/results/demo.json."""
    recipe = demo.Recipe()
    with tempfile.TemporaryDirectory(prefix="tevatron-bench-") as folder:
        home = Path(folder)
        work = demo.prepare(home, ROOT / "examples" / "sample")
        started = time.monotonic()
        with demo.running_stack(home, roots=[home, Path(work.model)]) as client:
            names = demo.register_input(client, work)
            found = demo.follow(client, _jobs(names, recipe))
        seconds = time.monotonic() - started
        values = {str(entry.name): entry.metrics for entry in found}
        values["random"] = _random_order(BeirFolder(work.heldout), depth=recipe.rerank_depth)
    trained = [values[f"trained-{seed}"] for seed in SEEDS]
    values["trained"] = {
        name: statistics.median(entry[name] for entry in trained) for name in METRICS
    }
    layout = f"BM25 top {recipe.rerank_depth}, examples/sample"
    rows = [
        row(
            name=name,
            model=MODEL,
            layout=layout,
            method="ours",
            system=system,
            value=metrics[name],
            unit=name,
        )
        for system, metrics in sorted(values.items())
        for name in METRICS
    ]
    gain = values["trained"]["ndcg@10"] - values["untrained"]["ndcg@10"]
    rows.append(
        row(
            name="trained over untrained",
            model=MODEL,
            layout=layout,
            method="ours",
            value=gain,
            unit="nDCG@10",
        )
    )
    rows.append(
        row(
            name="three trainings, five evaluations",
            model=MODEL,
            layout="2 cores",
            method="ours",
            value=seconds,
            unit="s",
        )
    )
    for entry in rows:
        print(
            f"{entry['name']:<34} {entry.get('system', ''):<12} {entry['value']:.4f} {entry['unit']}"
        )
    print(write_rows("demo", rows, packages=("torch", "transformers")))


def _jobs(names: demo.Names, recipe: demo.Recipe) -> JobGroup:
    """Return the demo's jobs, with a training and its evaluation for each seed."""
    jobs = {}
    for seed in SEEDS:
        group = demo.demo_jobs(names, replace(recipe, seed=seed)).jobs
        trained = group["trained"]
        assert isinstance(trained, EvalJob)
        assert trained.rerank is not None
        jobs |= {
            "bm25": group["bm25"],
            "untrained": group["untrained"],
            f"train-{seed}": group["train"],
        }
        rerank = trained.rerank.model_copy(update={"checkpoint": From(source=f"train-{seed}")})
        jobs[f"trained-{seed}"] = trained.model_copy(
            update={"name": f"trained-{seed}", "rerank": rerank}
        )
    return JobGroup(jobs=jobs)


def _random_order(dataset: BeirFolder, *, depth: int) -> dict[str, float]:
    """Return the mean metrics of the first stage with its best `depth` candidates shuffled."""
    qrels, queries = dataset.qrels("test"), dataset.queries()
    run = search_all(open_index(dataset), {qid: queries[qid] for qid in qrels}, depth=100)
    wanted = [parse_metric(name) for name in METRICS]
    draw, sums = random.Random(0), dict.fromkeys(METRICS, 0.0)
    for _ in range(DRAWS):
        shuffled = {}
        for qid, scores in run.items():
            ranked = rank(scores)
            best = draw.sample(ranked[:depth], len(ranked[:depth])) + ranked[depth:]
            shuffled[qid] = {docid: float(-place) for place, docid in enumerate(best)}
        means = evaluate(qrels, shuffled, wanted).means
        for name, metric in zip(METRICS, wanted, strict=True):
            sums[name] += means[str(metric)]
    return {name: total / DRAWS for name, total in sums.items()}


if __name__ == "__main__":
    main()
