"""What the specs of jobs say of one another: whose output a job uses, and whether it can be put to that use.

Pure: whoever submits checks it before anything is sent, the store before anything is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from types import MappingProxyType

from tevatron.core.contracts.checkpoint import check_dtype
from tevatron.core.contracts.jobs import (
    AnnotateJob,
    AnyJob,
    EvalJob,
    ExportJob,
    From,
    JobKind,
    ScoredBy,
    TrainJob,
)
from tevatron.core.contracts.train import Head
from tevatron.core.errors import ConfigError, InputError, unknown_name

NO_JOBS: Mapping[str, AnyJob] = MappingProxyType({})
_SOURCES: dict[JobKind, tuple[JobKind, ...]] = {
    JobKind.TRAIN: (JobKind.ANNOTATE,),
    JobKind.EXPORT: (JobKind.TRAIN,),
    JobKind.EVAL: (JobKind.TRAIN, JobKind.EXPORT),
    JobKind.ANNOTATE: (JobKind.TRAIN, JobKind.EXPORT),
}
"""Kinds of job whose output a job of this kind can use."""


def check_group(specs: Mapping[str, AnyJob], *, earlier: Mapping[str, AnyJob] = NO_JOBS) -> None:
    """Refuse a `{from: name}` that names no job, one of the wrong kind, one that cannot give it, or a circle.

    Args:
        specs: The jobs of one submission, by name.
        earlier: Jobs that were submitted before, by id, without a `{from: name}` of their own.
    """
    known = {**earlier, **specs}
    for name, spec in specs.items():
        for source in sorted(job_sources(spec)):
            if source not in known:
                raise ConfigError(f"{_label(name)}{unknown_name('source job', source, specs)}")
            kind, fits = known[source].kind, _SOURCES[spec.kind]
            if kind not in fits:
                raise ConfigError(
                    f"{_label(name)}source '{source}' is of kind {kind}; "
                    f"one of kind {' or '.join(fits)} is needed here"
                )
    try:
        TopologicalSorter({name: job_sources(spec) for name, spec in specs.items()}).prepare()
    except CycleError as error:
        raise ConfigError(f"jobs wait for one another: {' -> '.join(error.args[1])}") from error
    for name, spec in specs.items():
        try:
            _check_output(spec, known)
        except InputError as error:
            raise ConfigError(f"{_label(name)}{error}") from error


def _label(name: str) -> str:
    """Return what an error about this job begins with; a spec that is alone needs nothing."""
    return f"job '{name}': " if name else ""


def _check_output(spec: AnyJob, specs: Mapping[str, AnyJob]) -> None:
    """Refuse a use of another job's output that this output cannot be put to."""
    for source in job_sources(spec):
        given = specs[source]
        if isinstance(spec, ExportJob) and isinstance(given, TrainJob):
            check_export(spec, given)
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


def check_export(spec: ExportJob, train: TrainJob) -> None:
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


def job_sources(spec: AnyJob) -> set[str]:
    """Return the names of the jobs whose output `spec` uses."""
    refs: list[str | From | None]
    if isinstance(spec, TrainJob):
        refs = [spec.dataset, spec.validation]
    elif isinstance(spec, ExportJob):
        refs = [spec.train]
    elif isinstance(spec, EvalJob):
        refs = [] if spec.rerank is None else [spec.rerank.checkpoint]
    else:
        refs = [spec.teacher.checkpoint]
    return {ref.source for ref in refs if isinstance(ref, From)}


def with_sources(spec: AnyJob, outputs: Mapping[str, str] | Mapping[str, From]) -> AnyJob:
    """Return the spec with each `{from: name}` replaced by what `outputs` has for the name."""
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


def _with_checkpoint(wanted: ScoredBy, outputs: Mapping[str, str] | Mapping[str, From]) -> ScoredBy:
    if isinstance(wanted.checkpoint, From):
        return wanted.model_copy(update={"checkpoint": outputs[wanted.checkpoint.source]})
    return wanted
