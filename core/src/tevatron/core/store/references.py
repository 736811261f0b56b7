"""What a spec refers to: names become ids at submission, `{from: name}` becomes an id once its source has succeeded.

Checks here whatever can be known before a job runs. Knows nothing of states and events.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import ValidationError
from sqlalchemy import select
from sqlalchemy.orm import Session

from tevatron.core.contracts.jobs import (
    AnnotateJob,
    AnyJob,
    EvalJob,
    ExportJob,
    From,
    JobKind,
    RankList,
    ScoredBy,
    TrainJob,
)
from tevatron.core.contracts.sources import check_export, with_sources
from tevatron.core.errors import ConfigError, unknown_name
from tevatron.core.prompts import get_template
from tevatron.core.store.checkpoints import CheckpointRepository
from tevatron.core.store.claims import SPEC
from tevatron.core.store.models import DatasetKind, Job, JobDependency, Scorer
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.store.repository import KeyScope, Repository
from tevatron.core.store.scorers import ScorerRepository


class _JobReferences(Repository[Job]):
    table = Job
    noun = "job"

    def with_ids(self, ids: Collection[str], *, key_id: KeyScope) -> Sequence[Job]:
        """Return those of the key's jobs that have one of these ids."""
        return self._session.scalars(self._visible(key_id).where(Job.id.in_(ids))).all()

    def sources_of(self, job_id: str) -> dict[str, str]:
        """Return the ids of the jobs whose output a job uses, by the names that its spec has for them."""
        rows = self._session.execute(
            select(JobDependency.source_name, JobDependency.source_id).where(
                JobDependency.job_id == job_id
            )
        )
        return dict(rows.all())


class References:
    """Resolves what the specs of one key, or of an administrator, refer to."""

    def __init__(self, session: Session, *, key_id: KeyScope) -> None:
        self._key_id = key_id
        self._jobs = _JobReferences(session)
        self._models = ModelRepository(session)
        self._datasets = DatasetRepository(session)
        self._checkpoints = CheckpointRepository(session)
        self._scorers = ScorerRepository(session)

    def resolve(self, spec: AnyJob) -> AnyJob:
        """Return the spec with ids in place of names; an unknown one is an error with the closest match."""
        if isinstance(spec, TrainJob):
            return self._train(spec)
        if isinstance(spec, ExportJob):
            return self._export(spec)
        if isinstance(spec, AnnotateJob):
            return self._annotate(spec)
        return self._eval(spec)

    def earlier(self, ids: Collection[str]) -> dict[str, AnyJob]:
        """Return the specs of those jobs among `ids` that the key has submitted before, with ids for `{from: name}`."""
        found: dict[str, AnyJob] = {}
        for job in self._jobs.with_ids(ids, key_id=self._key_id):
            try:
                spec = SPEC.validate_python(job.resolved)
            except ValidationError as error:
                raise ConfigError(f"this build cannot read job '{job.id}': {error}") from error
            found[job.id] = with_sources(spec, self._jobs.sources_of(job.id))
        return found

    def _train(self, spec: TrainJob) -> TrainJob:
        get_template(spec.arguments.prompt_template)
        model = self._models.get(spec.model, key_id=self._key_id)
        rows = {
            name: self._dataset(ref, DatasetKind.TRAINING)
            for name, ref in (("dataset", spec.dataset), ("validation", spec.validation))
            if isinstance(ref, str)
        }
        return spec.model_copy(update={"model": model.id, **rows})

    def _export(self, spec: ExportJob) -> ExportJob:
        if isinstance(spec.train, From):
            return spec
        job = self._jobs.get(spec.train, key_id=self._key_id)
        if job.kind is not JobKind.TRAIN:
            raise ConfigError(
                f"job '{spec.train}' is of kind {job.kind}; an export needs a train job"
            )
        try:
            check_export(spec, TrainJob.model_validate(job.resolved))
        except ValidationError as error:
            raise ConfigError(f"this build cannot read job '{spec.train}': {error}") from error
        saved = (job.result or {}).get("saved_steps")
        if isinstance(saved, list) and spec.step is not None and spec.step not in saved:
            raise ConfigError(
                f"step: train job '{spec.train}' has the saved steps {', '.join(map(str, saved))}, got {spec.step}"
            )
        return spec.model_copy(update={"train": job.id})

    def _eval(self, spec: EvalJob) -> EvalJob:
        dataset = self._datasets.get_of_kind(spec.dataset, DatasetKind.BEIR, key_id=self._key_id)
        splits = dataset.stats.get("splits")
        if isinstance(splits, dict) and spec.split not in splits:
            raise ConfigError(
                f"split: dataset '{spec.dataset}': {unknown_name('split', spec.split, splits)}"
            )
        first_stage = spec.first_stage
        if isinstance(first_stage, RankList):
            run = self._dataset(first_stage.dataset, DatasetKind.RANKLIST)
            first_stage = first_stage.model_copy(update={"dataset": run})
        return spec.model_copy(
            update={
                "dataset": dataset.id,
                "first_stage": first_stage,
                "rerank": None if spec.rerank is None else self._scored_by(spec.rerank, "rerank"),
            }
        )

    def _annotate(self, spec: AnnotateJob) -> AnnotateJob:
        return spec.model_copy(
            update={
                "dataset": self._dataset(spec.dataset, DatasetKind.TRAINING),
                "teacher": self._scored_by(spec.teacher, "teacher"),
            }
        )

    def _scored_by(self, wanted: ScoredBy, what: str) -> ScoredBy:
        _check_scored_by(wanted, what)
        if isinstance(wanted.checkpoint, str):
            checkpoint = self._checkpoints.get_servable(
                wanted.checkpoint, key_id=self._key_id, dtype=wanted.dtype
            )
            return wanted.model_copy(update={"checkpoint": checkpoint.id})
        if wanted.model is not None:
            model = self._models.get(wanted.model, key_id=self._key_id)
            return wanted.model_copy(update={"model": model.id})
        if wanted.scorers is not None:
            scorers = [self._scorers.get_live(ref, key_id=self._key_id) for ref in wanted.scorers]
            _check_alike(scorers, what)
            return wanted.model_copy(update={"scorers": [scorer.id for scorer in scorers]})
        return wanted

    def _dataset(self, ref: str, kind: DatasetKind) -> str:
        return self._datasets.get_of_kind(ref, kind, key_id=self._key_id).id


def _check_scored_by(wanted: ScoredBy, what: str) -> None:
    given = [
        name for name in ("checkpoint", "model", "scorers") if getattr(wanted, name) is not None
    ]
    if len(given) != 1:
        raise ConfigError(
            f"{what}: expected exactly one of checkpoint, model and scorers, "
            f"got {', '.join(given) or 'none'}"
        )
    if wanted.model is not None and wanted.prompt_template is None:
        raise ConfigError(f"{what}: a model without a contract needs prompt_template")
    if wanted.prompt_template is not None:
        get_template(wanted.prompt_template)
    if wanted.scorers is not None:
        for name, is_set in (
            ("dtype", wanted.dtype is not None),
            ("replicas", wanted.replicas > 1),
        ):
            if is_set:
                raise ConfigError(
                    f"{what}: {name} is the scorer's own; scorers that are there keep theirs"
                )
    if wanted.model is None:
        for name in ("prompt_template", "max_length"):
            if getattr(wanted, name) is not None:
                raise ConfigError(
                    f"{what}: {name} belongs to a model without a contract, got one with {given[0]}"
                )


def _check_alike(scorers: Sequence[Scorer], what: str) -> None:
    """Refuse scorers of unlike models: one ranking would mix scores that cannot be compared."""
    # What an outside one serves is asked before it gets work.
    own = [scorer for scorer in scorers if not scorer.external]
    for name in ("checkpoint_id", "model_id", "engine", "dtype", "prompt_template", "max_length"):
        values = {scorer.id: getattr(scorer, name) for scorer in own}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"{scorer_id} has {value}" for scorer_id, value in values.items())
            raise ConfigError(
                f"{what}: the scorers differ in {name}, and their scores cannot be compared: {listed}"
            )
