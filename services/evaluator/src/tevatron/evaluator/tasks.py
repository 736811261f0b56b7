"""What a claimed eval job does: retrieve, rerank, compute metrics, and leave one evaluation.

The run is kept in the job's run folder; means and per-query values go to Postgres in the transaction in which the job
succeeds. A later attempt retrieves again and scores only what is not in the log of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pydantic import JsonValue
from sqlalchemy.orm import Session

from tevatron.core.contracts.jobs import Bm25, EvalJob, JobKind, Phase, Rerank
from tevatron.core.errors import InputError
from tevatron.core.formats.files import sha256_file
from tevatron.core.formats.ranklist import write_ranklist
from tevatron.core.store.evaluations import EvaluationRepository, Value
from tevatron.core.store.models import Evaluation
from tevatron.core.worker.runner import Finished, Handler, JobContext
from tevatron.evaluator.annotate_task import AnnotateTask
from tevatron.evaluator.benchmarks import Dataset, get_benchmark, load_excluded, prepare_run
from tevatron.evaluator.files import whole_file
from tevatron.evaluator.first_stage import Collection, read_collection, read_run, retrieve_bm25
from tevatron.evaluator.hashes import qrels_sha256
from tevatron.evaluator.job_scoring import JobScoring
from tevatron.evaluator.metrics import (
    VARIANTS,
    Metric,
    MetricName,
    Metrics,
    Qrels,
    Run,
    common_variant,
    evaluate,
    parse_metric,
)
from tevatron.evaluator.pool import PoolOptions
from tevatron.evaluator.rerank import identity_of, read_documents, rerank_first_stage
from tevatron.evaluator.results import as_json, write_results
from tevatron.evaluator.score_log import ScoreLog
from tevatron.evaluator.scorers import JobScorers, dataset_path
from tevatron.evaluator.tables import System, compare

RUNS = "runs"
CACHE = "cache"
FIRST_STAGE_NAME = "first_stage.txt"
RUN_NAME = "run.txt"
METRICS_NAME = "metrics.json"
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
    return {JobKind.EVAL: EvalTask(pool), JobKind.ANNOTATE: AnnotateTask(pool)}


class EvalTask:
    """The handler of eval jobs."""

    def __init__(self, pool: PoolOptions | None = None) -> None:
        self._pool = pool

    def __call__(self, ctx: JobContext, spec: EvalJob) -> Finished:
        """Evaluate one run."""
        ctx.phase(Phase.PREPARING)
        folder = ctx.settings.data / RUNS / ctx.claim.job_id
        folder.mkdir(parents=True, exist_ok=True)
        rules = _rules(spec)
        collection = read_collection(
            dataset_path(ctx, spec.dataset), rules.split, tell=_teller(ctx)
        )
        rules.check(collection.qrels, origin=str(collection.folder.path.name))
        scorers = None if spec.rerank is None else JobScorers(ctx, spec.rerank)
        if scorers is not None:
            # Before the retrieval, so that the model loads meanwhile.
            scorers.request()
        ctx.phase(Phase.RETRIEVING)
        first = _drop(ctx, rules, collection, _first_stage(ctx, spec, collection))
        _write_run(folder / FIRST_STAGE_NAME, first)
        run, target = first, _Target()
        if spec.rerank is not None and scorers is not None:
            run = self._rerank(ctx, spec.rerank, scorers, collection, first, folder / SCORES_NAME)
            target = _target(scorers)
            scorers.release()
        ctx.check()
        ctx.phase(Phase.EVALUATING)
        _write_run(folder / RUN_NAME, run)
        return _finish(ctx, spec, rules, collection, first=first, run=run, target=target)

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
            return rerank_first_stage(
                first,
                JobScoring(ctx, scorers, self._pool),
                log,
                depth=rerank.depth,
                queries=collection.queries,
                documents=documents,
                check=ctx.check,
            )


def _rules(spec: EvalJob) -> Dataset:
    """Return what holds for the data set: its benchmark's rules, or none but the split."""
    if spec.benchmark is None:
        return Dataset(name=spec.dataset, split=spec.split)
    return get_benchmark(spec.benchmark.name).dataset(spec.benchmark.dataset)


def _drop(ctx: JobContext, rules: Dataset, collection: Collection, run: Run) -> Run:
    """Drop what must not count for its query, before it is scored."""
    excluded = None
    if rules.drops_excluded:
        excluded = load_excluded(rules, folder=collection.folder.path)
    kept, num_dropped = prepare_run(rules, run, excluded=excluded)
    if num_dropped:
        ctx.log("info", f"{num_dropped} documents that must not count for their query are dropped")
    return kept


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
        dataset_path(ctx, stage.dataset), collection, depth=stage.depth, tell=_teller(ctx)
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
    ctx: JobContext,
    spec: EvalJob,
    rules: Dataset,
    collection: Collection,
    *,
    first: Run,
    run: Run,
    target: _Target,
) -> Finished:
    wanted = list(dict.fromkeys(parse_metric(text) for text in spec.metrics))
    level = rules.relevance_level
    found = evaluate(collection.qrels, run, wanted, relevance_level=level)
    first_found = found
    if run is not first:
        first_found = evaluate(collection.qrels, first, wanted, relevance_level=level)
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
    benchmark = None if spec.benchmark is None else spec.benchmark.model_dump(mode="json")
    write_results(
        ctx.settings.data / RUNS / ctx.claim.job_id / METRICS_NAME,
        {
            "dataset": rules.name,
            "benchmark": None if spec.benchmark is None else spec.benchmark.name,
            "split": rules.split,
            **as_json(found, wanted, per_query=True),
        },
    )
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
            split=rules.split,
            benchmark=benchmark,
            first_stage=first_stage | {"metrics": dict(first_found.means)},
            rerank=None if spec.rerank is None else spec.rerank.model_dump(mode="json"),
            checkpoint_id=target.checkpoint_id,
            model_id=target.model_id,
            metrics=found.means,
            num_queries=found.num_queries_qrels,
            variant=variant_of(wanted, relevance_level=level),
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


def variant_of(metrics: list[Metric], *, relevance_level: int = 1) -> str:
    """Say in one line how the numbers were computed."""
    names = list(dict.fromkeys(metric.name for metric in metrics))
    forms = "; ".join(f"{name.value}@k: {VARIANTS[name].format(k='k')}" for name in names)
    return f"pytrec_eval-terrier {version('pytrec-eval-terrier')}; {forms}; {common_variant(relevance_level)}"


def _values(found: Metrics) -> Iterator[Value]:
    for metric, by_query in found.values.items():
        for query_id, value in by_query.items():
            yield Value(metric, query_id, value)
