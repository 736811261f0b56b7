"""What a job is: its spec by kind, its states, the reasons for which it fails, its events."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    RootModel,
    Tag,
    model_validator,
)

from tevatron.core.contracts.train import TrainArguments, check_validation

Name = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""A name that a user gives: letters, digits, dot, underscore, hyphen."""
Ref = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
"""The id or the name of something registered."""


RemoteUrl = Annotated[
    str, Field(min_length=5, max_length=2000, pattern=r"^[a-z][a-z0-9]*://[!-~]+$")
]
"""A file or folder of a file system that fsspec has, such as s3://bucket/folder."""
Priority = Annotated[int, Field(ge=-10, le=10)]
"""Of queued jobs of a kind the highest is claimed first, then the oldest: a low one waits as long as higher ones come."""
METRIC_PATTERN = (
    r"^(ndcg|recall|map|mrr|precision|success|capped_recall|judged)@[1-9][0-9]{0,4}$|^rprec$"
)
"""Metrics that an evaluation may have; the evaluator's registry of them is the same."""
EngineName = Literal["hf", "vllm"]
"""Engines that scorer hosts may have."""
NumReplicas = Annotated[int, Field(ge=1, le=64)]
"""How many servers a scorer has."""
LauncherName = Literal["local", "jobset", "slurm"]
"""Ways to start the ranks of a job; the trainer's registry of them is the same."""


class Spec(BaseModel):
    """Base of everything that a user sends: unknown fields are refused, and "8" is no number.

    Whoever reads a command line or YAML (where 1e-5 is text) validates with `strict=False`. A field that holds an enum
    says `Field(strict=False)` itself: JSON has its value only.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        populate_by_name=True,
        use_attribute_docstrings=True,
    )


class From(Spec):
    """The output of another job."""

    source: Name = Field(alias="from")
    """The name of a job of the same submission, or the id of one that was submitted before."""


class JobKind(StrEnum):
    """Kinds of job."""

    TRAIN = "train"
    EXPORT = "export"
    EVAL = "eval"
    ANNOTATE = "annotate"


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
    priority: Priority = 0
    model: Ref
    """Base model: a registered model's id or name."""
    dataset: Ref | From
    """Training data: a registered dataset of kind `training`, or the annotate job that makes it."""
    validation: Ref | From | None = None
    """Held-out rows, a registered dataset of kind `training` or the annotate job that makes it; scored every `eval_steps` steps."""
    backend: Literal["hf", "megatron"] = "hf"
    num_processes: int = Field(default=1, ge=1, le=4096)
    """Ranks on all nodes together."""
    num_nodes: int | None = Field(default=None, ge=1, le=1024)
    """Machines, each with as many of the ranks; as few as have GPUs for them when unset."""
    launcher: LauncherName | None = None
    """What starts the ranks; the deployment's own when unset."""
    arguments: TrainArguments = Field(default_factory=TrainArguments)

    @model_validator(mode="after")
    def _validation_has_steps(self) -> Self:
        check_validation(self.arguments, is_given=self.validation is not None, name="validation")
        return self


class ExportJob(Spec):
    """Publish another checkpoint from a training job's saved state."""

    kind: Literal[JobKind.EXPORT] = JobKind.EXPORT
    version: Literal[1] = 1
    name: Name | None = None
    priority: Priority = 0
    train: Ref | From
    """The train job whose states are looked at."""
    step: int | None = Field(default=None, ge=1)
    """The saved step; when unset the best, where the run keeps one (`load_best_model_at_end`), else the newest."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Weights of the checkpoint; the training job's choice when unset."""
    form: Literal["merged", "adapter"] = "merged"
    """A LoRA run's merged weights, or its adapter alone in PEFT's format."""
    to: RemoteUrl | None = None
    """A folder into which the checkpoint is copied too, or a model repository `hf://owner/name` to which it is pushed, under a
    prefix that the operator allows."""
    launcher: LauncherName | None = None
    """What starts the export's process; the deployment's own when unset."""


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


class ScoredBy(Spec):
    """What scores pairs: exactly one of checkpoint, model and scorers."""

    checkpoint: Ref | From | None = None
    """A checkpoint, or the train or export job that publishes it."""
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
    replicas: NumReplicas = 1
    """Servers that the scorer has and that share the pairs, on as many hosts as have a free place."""


class Rerank(ScoredBy):
    """Rerank the candidates with a scorer."""

    depth: int = Field(default=100, ge=1, le=10000)
    """Candidates a query that are reranked; the others keep their order below them."""


class BenchmarkSet(Spec):
    """A data set of a benchmark, as the evaluator's registry has them."""

    name: Name
    """Benchmark, such as `beir15`."""
    dataset: Name
    """Data set, such as `scifact`."""


class EvalJob(Spec):
    """Compute metrics of a first stage, or of its reranking, and store them."""

    kind: Literal[JobKind.EVAL] = JobKind.EVAL
    version: Literal[1] = 1
    name: Name | None = None
    priority: Priority = 0
    dataset: Ref
    """A registered dataset of kind `beir`."""
    split: Name = "test"
    """Which qrels of the dataset."""
    benchmark: BenchmarkSet | None = None
    """Whose rules hold: its split in place of the one above, its counts, the grade from which a document is relevant, and
    which documents are dropped from the first stage."""
    first_stage: Annotated[Bm25 | RankList, Field(discriminator="kind")] = Field(
        default_factory=Bm25
    )
    rerank: Rerank | None = None
    metrics: list[Annotated[str, Field(pattern=METRIC_PATTERN)]] = Field(
        default_factory=lambda: ["ndcg@10", "recall@10", "recall@100", "map@100", "mrr@10"],
        min_length=1,
        max_length=50,
    )


class AnnotateJob(Spec):
    """Score a training set's passages with a teacher, and register the result as another training set."""

    kind: Literal[JobKind.ANNOTATE] = JobKind.ANNOTATE
    version: Literal[1] = 1
    name: Name | None = None
    """Name of the job; the new dataset takes it too where it is free."""
    priority: Priority = 0
    dataset: Ref
    """A registered dataset of kind `training`."""
    teacher: ScoredBy
    max_negatives: int = Field(default=15, ge=0, le=10000)
    """Negatives of a row that are scored; all positives are."""
    shuffle_negatives: bool = False
    """Draw the negatives in place of taking the first ones."""
    seed: int = 42
    limit: int | None = Field(default=None, ge=1)
    """Rows from the beginning; all when unset."""


AnyJob = TrainJob | ExportJob | EvalJob | AnnotateJob
JobSpec = Annotated[AnyJob, Field(discriminator="kind")]


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
        """Whether nothing follows unless somebody resumes the job."""
        return self.type is EventType.STATE and self.data["state"] in FINAL_STATES
