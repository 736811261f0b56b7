"""The metric core: nDCG, recall, MAP, MRR, precision and others at any cut-off, by trec_eval's own code.

Knows qrels and a run, and no benchmark, file or model. Every metric comes from one ranking: score descending, compared
in float32, equal scores by docid descending as a string (trec_eval 9). Queries of the qrels that the run lacks count 0
(trec_eval's -c); queries that only the run has are ignored; both are reported. Nothing is rounded.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral, Real
from typing import NamedTuple

import pytrec_eval

from tevatron.core.errors import ConfigError, InputError, unknown_name

Qrels = Mapping[str, Mapping[str, int]]
"""Query id -> docid -> relevance."""
Run = Mapping[str, Mapping[str, float]]
"""Query id -> docid -> score."""

MAX_RELEVANCE = 1_000_000
"""trec_eval keeps an array as long as the highest grade, and wraps grades to 32 bits without a word."""
MAX_CUTOFF = 1_000_000


class MetricName(StrEnum):
    """Names of the metrics."""

    NDCG = "ndcg"
    RECALL = "recall"
    MAP = "map"
    MRR = "mrr"
    PRECISION = "precision"
    SUCCESS = "success"
    CAPPED_RECALL = "capped_recall"
    JUDGED = "judged"
    R_PRECISION = "rprec"


WITHOUT_CUTOFF = frozenset({MetricName.R_PRECISION})
"""Metrics whose cut-off is the number of relevant documents."""


class Metric(NamedTuple):
    """A metric and its cut-off."""

    name: MetricName
    k: int | None = None

    def __str__(self) -> str:
        return self.name.value if self.k is None else f"{self.name.value}@{self.k}"


TREC_EVAL_NAMES: dict[MetricName, str] = {
    MetricName.NDCG: "ndcg_cut",
    MetricName.RECALL: "recall",
    MetricName.MAP: "map_cut",
    MetricName.MRR: "recip_rank",
    MetricName.PRECISION: "P",
    MetricName.SUCCESS: "success",
    MetricName.CAPPED_RECALL: "P",
    MetricName.R_PRECISION: "Rprec",
}
UNCUT = frozenset({"recip_rank", "Rprec"})
"""trec_eval's measures that take no cut-off."""
TIES = "ties by docid descending, scores compared in float32 (trec_eval 9)"
MISSING = "judged queries without results count 0 (trec_eval -c)"
VARIANTS: dict[MetricName, str] = {
    MetricName.NDCG: "trec_eval ndcg_cut.{k}: linear gain, log2 discount, ideal from all judged documents",
    MetricName.RECALL: "trec_eval recall.{k}: over all relevant documents, not capped at {k}",
    MetricName.MAP: "trec_eval map_cut.{k}: over all relevant documents, not capped at {k}",
    MetricName.MRR: "trec_eval recip_rank, 0 where the first relevant document is below rank {k}",
    MetricName.PRECISION: "trec_eval P.{k}: divided by {k} also where fewer are ranked",
    MetricName.SUCCESS: "trec_eval success.{k}: 1 where a relevant document is in the first {k}",
    MetricName.CAPPED_RECALL: "relevant documents in the first {k} over the smaller of {k} and all relevant ones (BEIR's R_cap)",
    MetricName.JUDGED: "share of the first {k} that have a judgment of any grade, of those that are ranked",
    MetricName.R_PRECISION: "trec_eval Rprec: precision at as many as are relevant",
}
UNGRADED = frozenset({MetricName.NDCG, MetricName.JUDGED})
"""Metrics that do not ask whether a document is relevant."""


def common_variant(relevance_level: int) -> str:
    """Say what all metrics share."""
    return f"relevant is grade {relevance_level} or higher; {MISSING}; {TIES}"


COMMON_VARIANT = common_variant(1)


def variant(metric: Metric, *, relevance_level: int = 1) -> str:
    """Say exactly what `metric` is here."""
    form = VARIANTS[metric.name].format(k="k" if metric.k is None else metric.k)
    level = "" if metric.name in UNGRADED else f"; relevant is grade {relevance_level} or higher"
    return f"{form}{level}; {MISSING}; {TIES}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """What an evaluation found; metrics are named `ndcg@10`."""

    means: dict[str, float]
    """Mean over the judged queries, missing ones as 0."""
    values: dict[str, dict[str, float]]
    """Metric -> query id -> value, for every judged query."""
    variants: dict[str, str]
    """Metric -> exactly what was computed."""
    relevance_level: int
    num_queries_qrels: int
    num_queries_run: int
    missing_queries: list[str]
    """Judged, but not in the run: counted 0."""
    extra_queries: list[str]
    """In the run, but not judged: ignored."""
    unjudged_queries: list[str]
    """Named by the qrels without a single judgment: ignored, as a qrels file could not name them."""
    num_tied: int
    """Ranked documents of judged queries whose float32 score another document of the query has too."""


def parse_metric(text: str) -> Metric:
    """Read `ndcg@10`, or `rprec`, which has no cut-off."""
    found = re.fullmatch(r"([A-Za-z_]+)(?:@([0-9]{1,9}))?", text)
    if found is None:
        raise ConfigError(f"metric '{text}' is not of the form name@k, for example ndcg@10")
    names = [metric.value for metric in MetricName]
    if found[1].lower() not in names:
        raise ConfigError(f"'{text}': {unknown_name('metric', found[1].lower(), names)}")
    name = MetricName(found[1].lower())
    if name in WITHOUT_CUTOFF:
        if found[2] is not None:
            raise ConfigError(f"metric '{name.value}' has no cut-off, got '{text}'")
        return Metric(name)
    if found[2] is None:
        raise ConfigError(f"metric '{text}' is not of the form name@k, for example ndcg@10")
    k = int(found[2])
    if not 1 <= k <= MAX_CUTOFF:
        raise ConfigError(f"the cut-off of '{text}' must be between 1 and {MAX_CUTOFF}, got {k}")
    return Metric(name, k)


def evaluate(
    qrels: Qrels, run: Run, metrics: Iterable[Metric], *, relevance_level: int = 1
) -> Metrics:
    """Compute `metrics` of `run`, per query and in the mean.

    Args:
        qrels: Grades by query and document; every query of it counts.
        run: Scores by query and document, in any order.
        metrics: Which; each is computed once.
        relevance_level: Grade from which a document is relevant (trec_eval's -l); nDCG takes the grades as they are.
    """
    wanted = list(dict.fromkeys(metrics))
    if not wanted:
        raise ConfigError("no metric was asked for: expected at least one, for example ndcg@10")
    if relevance_level < 1:
        raise ConfigError(f"the relevance level must be 1 or more, got {relevance_level}")
    judged = {qid: _checked_grades(qid, grades) for qid, grades in qrels.items() if grades}
    if not judged:
        raise InputError("the qrels hold no judgment")
    ranked = {qid: _checked_scores(qid, scores) for qid, scores in run.items() if scores}
    both = {qid: ranked[qid] for qid in judged if qid in ranked}
    if not both:
        raise InputError(
            f"no query of the run is judged: the qrels have {len(judged)} queries such as {_examples(judged)}, "
            f"the run has {len(ranked)} such as {_examples(ranked) or 'none'}"
        )
    found = _trec_eval(judged, both, wanted, relevance_level)
    values = {
        str(m): _by_query(m, judged, both, found, relevance_level=relevance_level) for m in wanted
    }
    return Metrics(
        # fsum: the mean does not depend on the order of the queries.
        means={
            name: math.fsum(by_query.values()) / len(judged) for name, by_query in values.items()
        },
        values=values,
        variants={str(m): variant(m, relevance_level=relevance_level) for m in wanted},
        relevance_level=relevance_level,
        num_queries_qrels=len(judged),
        num_queries_run=len(ranked),
        missing_queries=sorted(judged.keys() - ranked.keys()),
        extra_queries=sorted(ranked.keys() - judged.keys()),
        unjudged_queries=sorted(qid for qid, grades in qrels.items() if not grades),
        num_tied=sum(_count_tied(scores) for scores in both.values()),
    )


def rank(scores: Mapping[str, float]) -> list[str]:
    """Order docids as the metrics do: score descending in float32, equal scores by docid descending."""
    singles = array("f", scores.values())
    # UTF-8 bytes, as strcmp sees them; Python's order of code points is the same, also beyond the BMP.
    return [docid for _, docid in sorted(zip(singles, scores, strict=True), reverse=True)]


def cut(run: Run, *, depth: int) -> dict[str, dict[str, float]]:
    """Keep the best `depth` documents of each query, best first."""
    return {
        qid: {docid: scores[docid] for docid in rank(scores)[:depth]} for qid, scores in run.items()
    }


def remove_identical(run: Run) -> tuple[dict[str, dict[str, float]], int]:
    """Drop documents that carry their query's id (ArguAna, Quora); return the run and how many went."""
    kept = {
        qid: {docid: score for docid, score in scores.items() if docid != qid}
        for qid, scores in run.items()
    }
    return kept, sum(len(scores) for scores in run.values()) - sum(
        len(scores) for scores in kept.values()
    )


def _trec_eval(
    judged: Mapping[str, Mapping[str, int]],
    both: Mapping[str, Mapping[str, float]],
    wanted: list[Metric],
    relevance_level: int,
) -> dict[str, dict[str, float]]:
    cutoffs: dict[str, set[int]] = {}
    for metric in wanted:
        if metric.name in TREC_EVAL_NAMES:
            cutoffs.setdefault(TREC_EVAL_NAMES[metric.name], set()).add(metric.k or 0)
    if not cutoffs:
        return {}
    measures = {
        name if name in UNCUT else f"{name}.{','.join(str(k) for k in sorted(ks))}"
        for name, ks in cutoffs.items()
    }
    evaluator = pytrec_eval.RelevanceEvaluator(
        {qid: judged[qid] for qid in both}, measures, relevance_level=relevance_level
    )
    found: dict[str, dict[str, float]] = evaluator.evaluate(both)
    return found


def _by_query(
    metric: Metric,
    judged: Mapping[str, Mapping[str, int]],
    both: Mapping[str, Mapping[str, float]],
    found: Mapping[str, Mapping[str, float]],
    *,
    relevance_level: int,
) -> dict[str, float]:
    """Return every judged query's value; 0 where the run has nothing for it."""
    if metric.name is MetricName.JUDGED:
        return {
            qid: _judged(grades, both[qid], metric.k or 0) if qid in both else 0.0
            for qid, grades in judged.items()
        }
    if metric.name is MetricName.CAPPED_RECALL:
        return {
            qid: _capped_recall(grades, found[qid], metric.k or 0, relevance_level)
            if qid in both
            else 0.0
            for qid, grades in judged.items()
        }
    name = TREC_EVAL_NAMES[metric.name]
    key = name if name in UNCUT else f"{name}_{metric.k}"
    values = {qid: found[qid][key] if qid in both else 0.0 for qid in judged}
    if metric.name is MetricName.MRR and metric.k is not None:
        # trec_eval's has no cut-off: 1/rank >= 1/k exactly where rank <= k.
        least = 1.0 / metric.k
        values = {qid: value if value >= least else 0.0 for qid, value in values.items()}
    return values


def _judged(grades: Mapping[str, int], scores: Mapping[str, float], k: int) -> float:
    best = rank(scores)[:k] if len(scores) > k else list(scores)
    return len(grades.keys() & best) / len(best)


def _capped_recall(
    grades: Mapping[str, int], found: Mapping[str, float], k: int, relevance_level: int
) -> float:
    num_relevant = sum(grade >= relevance_level for grade in grades.values())
    # P.k is a whole number over k.
    return round(found[f"P_{k}"] * k) / min(k, num_relevant) if num_relevant else 0.0


def _check_ids(qid: str, docids: Iterable[str]) -> None:
    # A NUL ends a string in trec_eval, so that two ids fall together; half a surrogate pair ends the process.
    joined = "\n".join([qid, *docids])
    if not joined.isascii() or "\0" in joined:
        for name in [qid, *docids]:
            if "\0" in name or not _is_utf8(name):
                raise InputError(
                    f"query {qid!a}: id {name!a} must be UTF-8 text without NUL characters"
                )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_grades(qid: str, grades: Mapping[str, int]) -> dict[str, int]:
    _check_ids(qid, grades)
    checked: dict[str, int] = {}
    for docid, grade in grades.items():
        if isinstance(grade, bool) or not isinstance(grade, Integral):
            raise InputError(
                f"relevance of query '{qid}', document '{docid}' must be an integer, got {grade!r} ({type(grade).__name__})"
            )
        if abs(int(grade)) > MAX_RELEVANCE:
            raise InputError(
                f"relevance of query '{qid}', document '{docid}' must be within {MAX_RELEVANCE} of 0, got {grade}"
            )
        checked[docid] = int(grade)
    return checked


def _checked_scores(qid: str, scores: Mapping[str, float]) -> dict[str, float]:
    _check_ids(qid, scores)
    if isinstance(scores, dict) and set(map(type, scores.values())) <= {float, int}:
        # The usual case, without a step of Python for every document.
        plain = scores
    else:
        plain = {docid: _as_float(qid, docid, score) for docid, score in scores.items()}
    total = sum(plain.values())
    if total != total:
        # NaN, or the sum of both infinities.
        for docid, score in plain.items():
            if score != score:
                raise InputError(
                    f"score of query '{qid}', document '{docid}' is NaN; it has no place in a ranking"
                )
    return plain


def _as_float(qid: str, docid: str, score: object) -> float:
    if isinstance(score, bool) or not isinstance(score, Real):
        raise InputError(
            f"score of query '{qid}', document '{docid}' must be a number, got {score!r} ({type(score).__name__})"
        )
    return float(score)


def _count_tied(scores: Mapping[str, float]) -> int:
    singles = array("f", scores.values())
    if len(set(singles)) == len(singles):
        return 0
    return sum(count for count in Counter(singles).values() if count > 1)


def _examples(ids: Iterable[str]) -> str:
    return ", ".join(f"'{qid}'" for qid in sorted(ids)[:3])
