"""What a job is: its spec by kind, its states, the reasons for which it fails, its events."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, RootModel, Tag

from tevatron.core.contracts.train import TrainArguments

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""A name that a user gives: letters, digits, dot, underscore, hyphen."""
Ref = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""The id or the name of something registered."""


EngineName = Literal["hf", "vllm"]
"""Engines that scorer hosts may have."""


class Spec(BaseModel):
    """Base of everything that a user sends: unknown fields are refused, and "8" is no number.

    Whoever reads a command line or YAML (where 1e-5 is text) validates with `strict=False`.
    """

    model_config = ConfigDict(
        extra="forbid", strict=True, populate_by_name=True, use_attribute_docstrings=True
    )


class From(Spec):
    """The output of another job of the same submission."""

    source: Name = Field(alias="from")
    """The other job's name."""


class JobKind(StrEnum):
    """Kinds of job."""

    TRAIN = "train"
    EXPORT = "export"
    EVAL = "eval"


class JobState(StrEnum):
    """States of a job; the last three are final."""

    WAITING = "waiting"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


FINAL_STATES = frozenset({JobState.CANCELLED, JobState.SUCCEEDED, JobState.FAILED})
CLAIMED_STATES = frozenset({JobState.STARTING, JobState.RUNNING, JobState.CANCELLING})


class FailReason(StrEnum):
    """Why a job failed."""

    DEPENDENCY_FAILED = "dependency_failed"
    CONFIG_ERROR = "config_error"
    DATA_ERROR = "data_error"
    MODEL_ERROR = "model_error"
    CONTRACT_MISMATCH = "contract_mismatch"
    OUT_OF_MEMORY = "out_of_memory"
    SCORER_FAILED = "scorer_failed"
    NOT_FINITE = "not_finite"
    WORKER_LOST = "worker_lost"
    PROGRAM_FAILED = "program_failed"
    INTERNAL_ERROR = "internal_error"


class Phase(StrEnum):
    """What a claimed job is doing, finer than its state."""

    PREPARING = "preparing"
    LOADING = "loading"
    TRAINING = "training"
    SAVING = "saving"
    EXPORTING = "exporting"
    PUBLISHING = "publishing"
    RETRIEVING = "retrieving"
    WAITING_FOR_SCORER = "waiting_for_scorer"
    SCORING = "scoring"
    EVALUATING = "evaluating"


class TrainJob(Spec):
    """Train a reranker and publish one checkpoint."""

    kind: Literal[JobKind.TRAIN] = JobKind.TRAIN
    version: Literal[1] = 1
    name: Name | None = None
    """Name of the job; the checkpoint takes it too."""
    model: Ref
    """Base model: a registered model's id or name."""
    dataset: Ref
    """Training data: a registered dataset of kind `training`."""
    backend: Literal["hf", "megatron"] = "hf"
    num_processes: int = Field(default=1, ge=1, le=64)
    """Ranks on the worker's machine."""
    arguments: TrainArguments = Field(default_factory=TrainArguments)


class ExportJob(Spec):
    """Publish another checkpoint from a training job's saved state."""

    kind: Literal[JobKind.EXPORT] = JobKind.EXPORT
    version: Literal[1] = 1
    name: Name | None = None
    train: Ref | From
    """The train job whose states are looked at."""
    step: int | None = Field(default=None, ge=1)
    """The saved step; the newest when unset."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Weights of the checkpoint; the training job's choice when unset."""
    form: Literal["merged", "adapter"] = "merged"
    """A LoRA run's merged weights, or its adapter alone in PEFT's format."""


class Bm25(Spec):
    """Retrieve with BM25 over the dataset's corpus (k1 .9, b .4, Porter, Lucene's stop words)."""

    kind: Literal["bm25"] = "bm25"
    depth: int = Field(default=100, ge=1, le=10000)
    """Passages a query."""


class RankList(Spec):
    """Take the candidates from a registered run."""

    kind: Literal["ranklist"] = "ranklist"
    dataset: Ref
    """A registered dataset of kind `ranklist`."""
    depth: int = Field(default=1000, ge=1, le=10000)
    """Candidates a query that are kept."""


class Rerank(Spec):
    """Rerank the candidates with a scorer: exactly one of checkpoint, model and scorers."""

    checkpoint: Ref | From | None = None
    """A checkpoint, or the train or export job of this submission that publishes it."""
    model: Ref | None = None
    """A registered model without a contract; needs prompt_template."""
    scorers: list[Ref] | None = Field(default=None, min_length=1, max_length=64)
    """Scorers that are there already."""
    engine: EngineName = "hf"
    """A host that has this engine serves the scorer."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Arithmetic of the scorer; the checkpoint's own when unset."""
    prompt_template: str | None = None
    """Template of a model without a contract."""
    max_length: int | None = Field(default=None, ge=16, le=131072)
    """Longest prompt of a model without a contract."""
    depth: int = Field(default=100, ge=1, le=10000)
    """Candidates a query that are reranked; the others keep their order below them."""


class EvalJob(Spec):
    """Compute metrics of a first stage, or of its reranking, and store them."""

    kind: Literal[JobKind.EVAL] = JobKind.EVAL
    version: Literal[1] = 1
    name: Name | None = None
    dataset: Ref
    """A registered dataset of kind `beir`."""
    split: Name = "test"
    """Which qrels of the dataset."""
    first_stage: Annotated[Bm25 | RankList, Field(discriminator="kind")] = Field(
        default_factory=Bm25
    )
    rerank: Rerank | None = None
    metrics: list[
        Annotated[str, Field(pattern=r"^(ndcg|recall|map|mrr|precision)@[1-9][0-9]{0,4}$")]
    ] = Field(
        default_factory=lambda: ["ndcg@10", "recall@10", "recall@100", "map@100", "mrr@10"],
        min_length=1,
        max_length=50,
    )


JobSpec = Annotated[TrainJob | ExportJob | EvalJob, Field(discriminator="kind")]


class JobGroup(Spec):
    """Several jobs, stored in one transaction; a spec refers to another's output as `{from: name}`."""

    jobs: dict[Name, JobSpec] = Field(min_length=1, max_length=1000)


def _form(content: object) -> str:
    is_group = "jobs" in content if isinstance(content, dict) else isinstance(content, JobGroup)
    return "group" if is_group else "spec"


class Submission(
    RootModel[
        Annotated[
            Annotated[JobSpec, Tag("spec")] | Annotated[JobGroup, Tag("group")],
            Discriminator(_form),
        ]
    ]
):
    """Body of `POST /v1/jobs`."""


class EventType(StrEnum):
    """Types of a job's events."""

    STATE = "state"
    """data: state, and reason and message where it failed."""
    PHASE = "phase"
    """data: phase."""
    PROGRESS = "progress"
    """data: done, total, unit, eta_s."""
    METRICS = "metrics"
    """data: numbers of one training step, or of an evaluation."""
    LOG = "log"
    """data: level, message."""


class JobEvent(BaseModel):
    """One line of a job's history; `seq` counts from 1 within the job."""

    seq: int
    time: datetime
    attempt: int
    type: EventType
    data: dict[str, JsonValue]

    @property
    def ends_job(self) -> bool:
        """Whether nothing can follow."""
        return self.type is EventType.STATE and self.data["state"] in FINAL_STATES


def job_sources(spec: TrainJob | ExportJob | EvalJob) -> set[str]:
    """Return the names of the jobs whose output `spec` uses."""
    if isinstance(spec, ExportJob):
        refs = [spec.train]
    elif isinstance(spec, EvalJob) and spec.rerank is not None:
        refs = [spec.rerank.checkpoint] if spec.rerank.checkpoint is not None else []
    else:
        refs = []
    return {ref.source for ref in refs if isinstance(ref, From)}
