"""The file `metrics.json`: the reference's form, with what was counted and exactly what was computed. Reads it back, too."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from tevatron.core.errors import FormatError
from tevatron.evaluator.files import whole_file
from tevatron.evaluator.metrics import Metric, MetricName, Metrics, common_variant

JSON_NAMES = {
    MetricName.NDCG: ("ndcg", "NDCG"),
    MetricName.MAP: ("map", "MAP"),
    MetricName.MRR: ("mrr", "MRR"),
    MetricName.RECALL: ("recall", "Recall"),
    MetricName.PRECISION: ("precision", "P"),
    MetricName.SUCCESS: ("success", "Success"),
    MetricName.CAPPED_RECALL: ("capped_recall", "R_cap"),
    MetricName.JUDGED: ("judged", "Judged"),
    MetricName.R_PRECISION: ("rprec", "Rprec"),
}
"""The reference's blocks and the names of its values, and ours in the same form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a `metrics.json` says."""

    dataset: str
    means: Mapping[str, float]
    """By metric, `ndcg@10`."""
    values: Mapping[str, Mapping[str, float]]
    """Metric -> query id -> value; empty where the file has no values of single queries."""


def as_json(
    found: Metrics, metrics: Sequence[Metric], *, per_query: bool = False
) -> dict[str, JsonValue]:
    """Return the reference's blocks `ndcg{"NDCG@10": ...}`, and what was counted."""
    document: dict[str, JsonValue] = {
        "n_queries_qrels": found.num_queries_qrels,
        "n_queries_ranked": found.num_queries_run,
    }
    for name, (key, _) in JSON_NAMES.items():
        block: dict[str, JsonValue] = {
            _label(m): found.means[str(m)] for m in metrics if m.name is name
        }
        if block:
            document[key] = block
    document |= {
        "n_queries_missing": len(found.missing_queries),
        "n_queries_extra": len(found.extra_queries),
        "n_tied": found.num_tied,
        "relevance_level": found.relevance_level,
        "variant": common_variant(found.relevance_level),
        "variants": dict(found.variants),
    }
    if per_query:
        document["per_query"] = {str(metric): dict(found.values[str(metric)]) for metric in metrics}
    return document


def write_results(path: Path, document: Mapping[str, JsonValue]) -> None:
    """Write a `metrics.json`, whole or not at all."""
    with whole_file(path) as beside:
        beside.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def read_results(path: Path) -> Results:
    """Read a `metrics.json`, ours or the reference's."""
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FormatError("no such file", path=path) from None
    except ValueError as error:
        raise FormatError(f"not JSON: {error}", path=path) from error
    if not isinstance(document, dict) or not isinstance(document.get("dataset"), str):
        raise FormatError("expected an object with a string `dataset`", path=path)
    means: dict[str, float] = {}
    for name, (key, _) in JSON_NAMES.items():
        for label, value in _numbers(document.get(key, {}), path, key).items():
            k = label.partition("@")[2]
            means[f"{name.value}@{k}" if k else name.value] = value
    if not means:
        raise FormatError(f"expected one of the blocks {', '.join(_blocks())}", path=path)
    values = document.get("per_query", {})
    if not isinstance(values, dict):
        raise FormatError("expected an object", path=path, field="per_query")
    return Results(
        dataset=document["dataset"],
        means=means,
        values={
            metric: _numbers(by_query, path, f"per_query.{metric}")
            for metric, by_query in values.items()
        },
    )


def _label(metric: Metric) -> str:
    label = JSON_NAMES[metric.name][1]
    return label if metric.k is None else f"{label}@{metric.k}"


def _blocks() -> list[str]:
    return [key for key, _ in JSON_NAMES.values()]


def _numbers(block: object, path: Path, field: str) -> dict[str, float]:
    if not isinstance(block, dict):
        raise FormatError("expected an object of numbers", path=path, field=field)
    for label, value in block.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FormatError(
                f"expected a number, got {value!r}", path=path, field=f"{field}.{label}"
            )
    return {str(label): float(value) for label, value in block.items()}
