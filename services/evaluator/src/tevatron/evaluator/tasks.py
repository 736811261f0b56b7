"""What a claimed eval job does: retrieve, rerank, compute metrics, and leave one evaluation.

The run is kept in the job's run folder; means and per-query values go to Postgres in the transaction in which the job
succeeds. A later attempt retrieves again and scores only what is not in the log of scores.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pydantic import JsonValue
from sqlalchemy.orm import Session

from tevatron.core.contracts.jobs import Bm25, EvalJob, FailReason, JobKind, Phase, Rerank
from tevatron.core.errors import InputError, JobError
from tevatron.core.formats.files import sha256_file
from tevatron.core.formats.ranklist import write_ranklist
from tevatron.core.store.evaluations import EvaluationRepository, Value
from tevatron.core.store.models import Evaluation
from tevatron.core.store.registered import DatasetRepository
from tevatron.core.worker.runner import Finished, Handler, JobContext
from tevatron.evaluator.files import whole_file
from tevatron.evaluator.first_stage import Collection, read_collection, read_run, retrieve_bm25
from tevatron.evaluator.metrics import (
    COMMON_VARIANT,
    VARIANTS,
    Metric,
    MetricName,
    Metrics,
    Qrels,
    Run,
    evaluate,
    parse_metric,
)
from tevatron.evaluator.pool import PoolOptions
from tevatron.evaluator.rerank import Reranker, identity_of, read_documents
from tevatron.evaluator.score_log import ScoreLog
from tevatron.evaluator.scorers import JobScorers, patiently
from tevatron.evaluator.tables import System, compare

RUNS = "runs"
CACHE = "cache"
FIRST_STAGE_NAME = "first_stage.txt"
RUN_NAME = "run.txt"
TABLE_NAME = "metrics.md"
SCORES_NAME = "scores.jsonl"

WATCHED = Metric(MetricName.NDCG, 10)
"""Compared with the first stage where the job asks for no nDCG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """What the evaluation row says was scored."""

    checkpoint_id: str | None = None
    model_id: str | None = None


def make_handlers(pool: PoolOptions | None = None) -> dict[JobKind, Handler]:
    """Return what an evaluator does for each kind of job."""
    return {JobKind.EVAL: EvalTask(pool)}


class EvalTask:
    """The handler of eval jobs."""

    def __init__(self, pool: PoolOptions | None = None) -> None:
        self._pool = pool

    def __call__(self, ctx: JobContext, spec: EvalJob) -> Finished:
        """Evaluate one run."""
        ctx.phase(Phase.PREPARING)
        folder = ctx.settings.data / RUNS / ctx.claim.job_id
        folder.mkdir(parents=True, exist_ok=True)
        collection = read_collection(
            _dataset_path(ctx, spec.dataset), spec.split, tell=_teller(ctx)
        )
        scorers = None if spec.rerank is None else JobScorers(ctx, spec.rerank)
        if scorers is not None:
            # Before the retrieval, so that the model loads meanwhile.
            scorers.request()
        ctx.phase(Phase.RETRIEVING)
        first = _first_stage(ctx, spec, collection)
        _write_run(folder / FIRST_STAGE_NAME, first)
        run, target = first, _Target()
        if spec.rerank is not None and scorers is not None:
            run = self._rerank(ctx, spec.rerank, scorers, collection, first, folder / SCORES_NAME)
            target = _target(scorers)
            scorers.release()
        ctx.check()
        ctx.phase(Phase.EVALUATING)
        _write_run(folder / RUN_NAME, run)
        return _finish(ctx, spec, collection, first=first, run=run, target=target)

    def _rerank(
        self,
        ctx: JobContext,
        rerank: Rerank,
        scorers: JobScorers,
        collection: Collection,
        first: Run,
        log_path: Path,
    ) -> Run:
        lost = sorted(first.keys() - collection.queries.keys())
        if lost:
            raise InputError(
                f"{len(lost)} queries of the run have no text in queries.jsonl and cannot be reranked, such as {lost[:3]}"
            )
        documents = read_documents(collection.folder, first)
        with ScoreLog(log_path, identity=identity_of(rerank)) as log:
            if len(log):
                ctx.log("info", f"{len(log)} scores of an earlier attempt are kept")
            reranker = Reranker(ctx, scorers, log, options=self._pool)
            return reranker.run(
                first, depth=rerank.depth, queries=collection.queries, documents=documents
            )


def _dataset_path(ctx: JobContext, dataset_id: str) -> Path:
    dataset = patiently(ctx, lambda session: DatasetRepository(session).by_id(dataset_id))
    if dataset.path is None:
        raise JobError(
            f"dataset '{dataset.name}' has no files here: it was registered by a hub id",
            reason=FailReason.CONFIG_ERROR,
            phase=Phase.PREPARING,
        )
    return ctx.settings.data / dataset.path


def _teller(ctx: JobContext) -> Callable[[str], None]:
    return lambda message: ctx.log("warning", message)


def _first_stage(ctx: JobContext, spec: EvalJob, collection: Collection) -> Run:
    stage = spec.first_stage
    if isinstance(stage, Bm25):
        return retrieve_bm25(
            collection,
            depth=stage.depth,
            cache=ctx.settings.data / CACHE,
            tell=_teller(ctx),
            on_progress=lambda done: ctx.progress(done, len(collection.queries), "queries"),
            check=ctx.check,
        )
    return read_run(
        _dataset_path(ctx, stage.dataset), collection, depth=stage.depth, tell=_teller(ctx)
    )


def _write_run(path: Path, run: Run) -> None:
    with whole_file(path) as beside:
        write_ranklist(beside, run, trec=True)


def _target(scorers: JobScorers) -> _Target:
    rows = scorers.rows()
    targets = {(row.checkpoint_id, row.model_id) for row in rows}
    if len(targets) > 1:
        # Several models had a hand in it: none of them is the evaluation's.
        return _Target()
    checkpoint_id, model_id = next(iter(targets))
    return _Target(checkpoint_id=checkpoint_id, model_id=model_id)


def _finish(
    ctx: JobContext, spec: EvalJob, collection: Collection, *, first: Run, run: Run, target: _Target
) -> Finished:
    wanted = list(dict.fromkeys(parse_metric(text) for text in spec.metrics))
    found = evaluate(collection.qrels, run, wanted)
    first_found = found if run is first else evaluate(collection.qrels, first, wanted)
    if found.missing_queries:
        ctx.log(
            "warning",
            f"{len(found.missing_queries)} of {found.num_queries_qrels} judged queries have no results and count 0, "
            f"such as {found.missing_queries[:3]}",
        )
    if run is not first:
        _warn_if_below(ctx, *_watched(collection.qrels, first, run, first_found, found))
    ctx.metrics(dict(found.means))
    _write_table(ctx, spec, first_found, found)
    evaluation_id = f"eval_{ctx.claim.job_id.partition('_')[2]}"
    run_sha256 = sha256_file(ctx.settings.data / RUNS / ctx.claim.job_id / RUN_NAME)

    def write(session: Session) -> None:
        first_stage: dict[str, JsonValue] = spec.first_stage.model_dump(mode="json")
        evaluation = Evaluation(
            id=evaluation_id,
            key_id=ctx.claim.key_id,
            name=ctx.claim.name,
            job_id=ctx.claim.job_id,
            dataset_id=spec.dataset,
            split=spec.split,
            first_stage=first_stage | {"metrics": dict(first_found.means)},
            rerank=None if spec.rerank is None else spec.rerank.model_dump(mode="json"),
            checkpoint_id=target.checkpoint_id,
            model_id=target.model_id,
            metrics=found.means,
            num_queries=found.num_queries_qrels,
            variant=variant_of(wanted),
            run_sha256=run_sha256,
            qrels_sha256=qrels_sha256(collection.qrels),
        )
        EvaluationRepository(session).add(evaluation, _values(found))

    return Finished(
        result={
            "evaluation_id": evaluation_id,
            "metrics": dict(found.means),
            "first_stage_metrics": dict(first_found.means),
            "num_queries": found.num_queries_qrels,
            "num_missing_queries": len(found.missing_queries),
            "num_tied": found.num_tied,
        },
        write=write,
    )


def _write_table(ctx: JobContext, spec: EvalJob, first_found: Metrics, found: Metrics) -> None:
    """Leave the numbers beside the run, to be read or pasted."""
    first_name = spec.first_stage.kind
    systems = [System(first_name, first_found.means)]
    if spec.rerank is not None:
        name = ctx.claim.name or "reranked"
        systems.append(System(name if name != first_name else "reranked", found.means))
    with whole_file(ctx.settings.data / RUNS / ctx.claim.job_id / TABLE_NAME) as beside:
        beside.write_text(
            compare(systems, list(found.means), first_stage=first_name), encoding="utf-8"
        )


def _watched(
    qrels: Qrels, first: Run, run: Run, first_found: Metrics, found: Metrics
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the nDCG of the first stage and of its reranking."""
    if any(name.startswith(f"{MetricName.NDCG}@") for name in found.means):
        return first_found.means, found.means
    return evaluate(qrels, first, [WATCHED]).means, evaluate(qrels, run, [WATCHED]).means


def _warn_if_below(
    ctx: JobContext, before: Mapping[str, float], after: Mapping[str, float]
) -> None:
    for name in before:
        if name.startswith(f"{MetricName.NDCG}@") and after[name] < before[name]:
            ctx.log(
                "warning",
                f"reranking lowers {name} from {before[name]:.4f} to {after[name]:.4f}: is the prompt template the one "
                "that the model was trained with?",
            )


def variant_of(metrics: list[Metric]) -> str:
    """Say in one line how the numbers were computed."""
    names = list(dict.fromkeys(metric.name for metric in metrics))
    forms = "; ".join(f"{name.value}@k: {VARIANTS[name].format(k='k')}" for name in names)
    return f"pytrec_eval-terrier {version('pytrec-eval-terrier')}; {forms}; {COMMON_VARIANT}"


def qrels_sha256(qrels: Qrels) -> str:
    """Hash judgments by content, whatever form and order their file has."""
    return hashlib.sha256(json.dumps(qrels, sort_keys=True).encode()).hexdigest()


def _values(found: Metrics) -> Iterator[Value]:
    for metric, by_query in found.values.items():
        for query_id, value in by_query.items():
            yield Value(metric, query_id, value)
