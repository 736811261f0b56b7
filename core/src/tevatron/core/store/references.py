"""What a spec refers to: names become ids at submission, `{from: name}` becomes an id once its source has succeeded.

Checks here whatever can be known before a job runs. Knows nothing of states and events.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from pydantic import ValidationError
from sqlalchemy.orm import Session

from tevatron.core.contracts.checkpoint import check_dtype
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
    job_sources,
)
from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError, InputError, unknown_name
from tevatron.core.prompts import get_template
from tevatron.core.store.checkpoints import CheckpointRepository
from tevatron.core.store.models import DatasetKind, Job, Scorer
from tevatron.core.store.registered import DatasetRepository, ModelRepository
from tevatron.core.store.repository import KeyScope, Repository
from tevatron.core.store.scorers import ScorerRepository


class _JobReferences(Repository[Job]):
    table = Job
    noun = "job"


_SOURCES: dict[JobKind, tuple[JobKind, ...]] = {
    JobKind.TRAIN: (JobKind.ANNOTATE,),
    JobKind.EXPORT: (JobKind.TRAIN,),
    JobKind.EVAL: (JobKind.TRAIN, JobKind.EXPORT),
    JobKind.ANNOTATE: (JobKind.TRAIN, JobKind.EXPORT),
}
"""Kinds of job whose output a job of this kind can use."""


def check_group(specs: Mapping[str, AnyJob]) -> None:
    """Refuse a `{from: name}` that names no job, one of the wrong kind, one that cannot give it, or a circle."""
    for name, spec in specs.items():
        for source in sorted(job_sources(spec)):
            if source not in specs:
                raise ConfigError(f"job '{name}': {unknown_name('source job', source, specs)}")
            kind, fits = specs[source].kind, _SOURCES[spec.kind]
            if kind not in fits:
                raise ConfigError(
                    f"job '{name}': source '{source}' is of kind {kind}; "
                    f"one of kind {' or '.join(fits)} is needed here"
                )
    try:
        TopologicalSorter({name: job_sources(spec) for name, spec in specs.items()}).prepare()
    except CycleError as error:
        raise ConfigError(f"jobs wait for one another: {' -> '.join(error.args[1])}") from error
    for name, spec in specs.items():
        try:
            _check_output(spec, specs)
        except InputError as error:
            raise ConfigError(f"job '{name}': {error}") from error


def _check_output(spec: AnyJob, specs: Mapping[str, AnyJob]) -> None:
    """Refuse a use of another job's output that this output cannot be put to."""
    for source in job_sources(spec):
        given = specs[source]
        if isinstance(spec, ExportJob) and isinstance(given, TrainJob):
            _check_export(spec, given)
        elif isinstance(spec, EvalJob) and spec.rerank is not None:
            if isinstance(given, ExportJob) and given.form == "adapter":
                raise ConfigError(
                    f"rerank: source '{source}' publishes an adapter alone, which no scorer serves"
                )
            dtype = _published_dtype(given, specs)
            if spec.rerank.dtype is not None and dtype is not None:
                check_dtype({"float32", dtype}, spec.rerank.dtype)


def _published_dtype(spec: AnyJob, specs: Mapping[str, AnyJob]) -> str | None:
    """Return the dtype of the checkpoint that a job publishes; None where these specs do not say."""
    if isinstance(spec, TrainJob):
        return spec.arguments.export_dtype or spec.arguments.dtype
    if isinstance(spec, ExportJob) and spec.dtype is None and isinstance(spec.train, From):
        return _published_dtype(specs[spec.train.source], specs)
    return spec.dtype if isinstance(spec, ExportJob) else None


def _check_export(spec: ExportJob, train: TrainJob) -> None:
    """Refuse an export that no state of this training can give."""
    arguments = train.arguments
    fits = train.backend == "hf" and arguments.use_lora and arguments.head is Head.YES_NO
    if spec.form == "adapter" and not fits:
        raise ConfigError(
            "form: 'adapter' needs a LoRA run of the hf backend with head 'yes_no', got "
            f"use_lora {arguments.use_lora}, backend '{train.backend}', head '{arguments.head}'"
        )
    if spec.step is not None and 0 < arguments.max_steps < spec.step:
        raise ConfigError(
            f"step: the train job ends at step {arguments.max_steps} (max_steps), got {spec.step}"
        )


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
            _check_export(spec, TrainJob.model_validate(job.resolved))
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
    if wanted.scorers is not None and wanted.dtype is not None:
        raise ConfigError(f"{what}: dtype is the scorer's own; scorers that are there keep theirs")
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


def with_sources(spec: AnyJob, outputs: Mapping[str, str]) -> AnyJob:
    """Return the spec with each `{from: name}` replaced by the id that `outputs` has for the name."""
    if isinstance(spec, TrainJob):
        refs = {"dataset": spec.dataset, "validation": spec.validation}
        made = {name: outputs[ref.source] for name, ref in refs.items() if isinstance(ref, From)}
        return spec.model_copy(update=made)
    if isinstance(spec, ExportJob) and isinstance(spec.train, From):
        return spec.model_copy(update={"train": outputs[spec.train.source]})
    if isinstance(spec, EvalJob) and spec.rerank is not None:
        return spec.model_copy(update={"rerank": _with_checkpoint(spec.rerank, outputs)})
    if isinstance(spec, AnnotateJob):
        return spec.model_copy(update={"teacher": _with_checkpoint(spec.teacher, outputs)})
    return spec


def _with_checkpoint(wanted: ScoredBy, outputs: Mapping[str, str]) -> ScoredBy:
    if isinstance(wanted.checkpoint, From):
        return wanted.model_copy(update={"checkpoint": outputs[wanted.checkpoint.source]})
    return wanted
