"""The command `tevatron.eval.metrics`: reads qrels and a ranked list, writes metrics.json in the reference's form."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import JsonValue

from tevatron.core.formats.beir import BeirFolder
from tevatron.core.formats.qrels import read_qrels
from tevatron.core.formats.ranklist import read_ranklist
from tevatron.evaluator.console import note, run_command, say
from tevatron.evaluator.files import whole_file
from tevatron.evaluator.metrics import (
    COMMON_VARIANT,
    Metric,
    MetricName,
    Metrics,
    Qrels,
    evaluate,
    parse_metric,
    remove_identical,
)
from tevatron.evaluator.tables import markdown

DEFAULT_K_VALUES = (10, 100, 200, 1000)
# The reference's keys, and the names of its values.
JSON_NAMES = {
    MetricName.NDCG: ("ndcg", "NDCG"),
    MetricName.MAP: ("map", "MAP"),
    MetricName.MRR: ("mrr", "MRR"),
    MetricName.RECALL: ("recall", "Recall"),
    MetricName.PRECISION: ("precision", "P"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    arguments = _parser().parse_args(argv)
    return run_command(lambda: _run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tevatron.eval.metrics",
        description="Compute retrieval metrics of a ranked list.",
    )
    judged = parser.add_mutually_exclusive_group(required=True)
    judged.add_argument(
        "--qrels", type=Path, help="judgments: TREC's 4 columns or BEIR's tsv, plain, gz or zst"
    )
    judged.add_argument("--dataset", type=Path, help="BEIR folder")
    parser.add_argument(
        "--split", default="test", help="which qrels of the BEIR folder (default: test)"
    )
    parser.add_argument(
        "--ranklist",
        type=Path,
        required=True,
        help="3 columns (query_id docid score) or TREC's 6, plain, gz or zst",
    )
    parser.add_argument("--output", type=Path, required=True, help="metrics.json to write")
    parser.add_argument(
        "--k_values",
        type=int,
        nargs="+",
        default=list(DEFAULT_K_VALUES),
        help="cut-offs (default: 10 100 200 1000)",
    )
    parser.add_argument(
        "--remove_query",
        action="store_true",
        help="drop ranked documents that carry their query's id, as is usual for ArguAna and Quora",
    )
    return parser


def _run(arguments: argparse.Namespace) -> None:
    ks = sorted(set(arguments.k_values))
    wanted = [parse_metric(f"{name}@{k}") for name in MetricName for k in ks]
    qrels, dataset, split = _read_judgments(arguments.qrels, arguments.dataset, arguments.split)
    run = read_ranklist(arguments.ranklist)
    num_removed = 0
    if arguments.remove_query:
        run, num_removed = remove_identical(run)
        note(f"{num_removed} documents carried their query's id and were removed")
    found = evaluate(qrels, run, wanted)
    document = {
        "dataset": dataset,
        "split": split,
        **as_json(found, wanted),
        "n_removed_identical": num_removed,
    }
    with whole_file(arguments.output) as path:
        path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    _report(found)
    rows = [[name, *(f"{found.means[f'{name}@{k}']:.4f}" for k in ks)] for name in MetricName]
    say(markdown([dataset, *(f"@{k}" for k in ks)], rows))


def _read_judgments(
    qrels: Path | None, dataset: Path | None, split: str
) -> tuple[Qrels, str, str | None]:
    if qrels is not None:
        return read_qrels(qrels), qrels.name, None
    assert dataset is not None
    folder = BeirFolder(dataset)
    return folder.qrels(split), dataset.resolve().name, split


def as_json(found: Metrics, metrics: Sequence[Metric]) -> dict[str, JsonValue]:
    """Return the reference's blocks `ndcg{"NDCG@10": ...}`, and what was counted."""
    document: dict[str, JsonValue] = {
        "n_queries_qrels": found.num_queries_qrels,
        "n_queries_ranked": found.num_queries_run,
    }
    for name, (key, label) in JSON_NAMES.items():
        document[key] = {f"{label}@{m.k}": found.means[str(m)] for m in metrics if m.name is name}
    return document | {
        "n_queries_missing": len(found.missing_queries),
        "n_queries_extra": len(found.extra_queries),
        "n_tied": found.num_tied,
        "variant": COMMON_VARIANT,
        "variants": dict(found.variants),
    }


def _report(found: Metrics) -> None:
    if found.missing_queries:
        note(
            f"{len(found.missing_queries)} of {found.num_queries_qrels} judged queries are not in the run and count 0, "
            f"such as {found.missing_queries[:3]}"
        )
    if found.extra_queries:
        note(
            f"{len(found.extra_queries)} queries of the run are not judged and are ignored, "
            f"such as {found.extra_queries[:3]}"
        )
    if found.num_tied:
        note(f"{found.num_tied} ranked documents tie with another one; ties go by docid descending")
