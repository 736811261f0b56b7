"""What a claimed annotate job does: score a training set with a teacher, and register the result as another one.

Rows lie in the job's run folder until all are there; a later attempt goes on at the first that is missing.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pydantic import JsonValue
from sqlalchemy.orm import Session

from tevatron.core.contracts.jobs import AnnotateJob, Phase
from tevatron.core.contracts.resources import DatasetKind
from tevatron.core.formats.files import sha256_file
from tevatron.core.formats.training import read_training
from tevatron.core.store.models import Dataset
from tevatron.core.store.registered import DatasetRepository
from tevatron.core.worker.runner import Finished, JobContext
from tevatron.evaluator import annotate as work
from tevatron.evaluator.job_scoring import JobScoring
from tevatron.evaluator.pool import Backends, PoolOptions
from tevatron.evaluator.scorers import JobScorers, dataset_path
from tevatron.evaluator.served import Served

RUNS = "runs"


class AnnotateTask:
    """The handler of annotate jobs."""

    def __init__(self, pool: PoolOptions | None = None) -> None:
        self._pool = pool

    def __call__(self, ctx: JobContext, spec: AnnotateJob) -> Finished:
        """Annotate one dataset."""
        ctx.phase(Phase.PREPARING)
        dataset_id = f"ds_{ctx.claim.job_id.partition('_')[2]}"
        published = ctx.settings.data / "datasets" / dataset_id / "content"
        if not published.is_file():
            output = self._annotate(ctx, spec, ctx.settings.data / RUNS / ctx.claim.job_id)
            ctx.check()
            ctx.phase(Phase.PUBLISHING)
            published.parent.mkdir(parents=True, exist_ok=True)
            output.replace(published)
        return _finish(ctx, spec, dataset_id, published)

    def _annotate(self, ctx: JobContext, spec: AnnotateJob, folder: Path) -> Path:
        options = work.AnnotateOptions(
            max_negatives=spec.max_negatives,
            shuffle_negatives=spec.shuffle_negatives,
            seed=spec.seed,
            limit=spec.limit,
        )
        scorers = JobScorers(ctx, spec.teacher)
        # Before the file is read, so that the model loads meanwhile.
        scorers.request()
        source = work.read_source(dataset_path(ctx, spec.dataset), options)
        if source.num_duplicate_ids:
            ctx.log("warning", work.describe_duplicates(source))
        scoring = JobScoring(ctx, scorers, self._pool)
        num_rows = 0

        def on_progress(done: int) -> None:
            nonlocal num_rows
            num_rows = done
            scoring.progress(done, source.num_rows, "rows")

        def score(backends: Backends, served: Served) -> Path:
            if work.has_other_teacher(folder, served):
                # A plain model on a host with another arithmetic: its scores are not those of the rows so far.
                ctx.log("warning", "the teacher serves something else than before; beginning again")
                work.forget(folder)
            return work.annotate(
                source,
                folder,
                backends,
                served=served,
                options=options,
                pool=self._pool,
                check=ctx.check,
                on_progress=on_progress,
            )

        output = scoring.run(score, num_kept=lambda: num_rows)
        scorers.release()
        return output


def _finish(ctx: JobContext, spec: AnnotateJob, dataset_id: str, path: Path) -> Finished:
    stats = _count(path)
    sha256 = sha256_file(path)
    key = path.relative_to(ctx.settings.data).as_posix()

    def write(session: Session) -> None:
        session.add(
            Dataset(
                id=dataset_id,
                key_id=ctx.claim.key_id,
                name=_free_name(session, ctx),
                kind=DatasetKind.TRAINING,
                path=key,
                sha256=sha256,
                stats={**stats, "annotated_from": spec.dataset},
            )
        )

    def discard() -> None:
        shutil.rmtree(path.parent)

    return Finished(result={"dataset_id": dataset_id, **stats}, write=write, discard=discard)


def _count(path: Path) -> dict[str, JsonValue]:
    rows = positives = negatives = 0
    for row in read_training(path):
        rows += 1
        positives += len(row.positives)
        negatives += len(row.negatives)
    return {"rows": rows, "positives": positives, "negatives": negatives}


def _free_name(session: Session, ctx: JobContext) -> str:
    """Return the job's name where no dataset of the key has it, else one that only this job has."""
    claim = ctx.claim
    if claim.name and DatasetRepository(session).find(claim.name, key_id=claim.key_id) is None:
        return claim.name
    return f"{claim.name or 'annotated'}-{claim.job_id}"[-100:]
