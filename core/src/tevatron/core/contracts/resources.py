"""What the API answers: jobs, checkpoints, models, datasets, scorers, evaluations, and pages of them.

Wire types only. They know neither tables nor HTTP; the API fills them, the command and its client read them.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from tevatron.core.contracts.jobs import (
    EngineName,
    FailReason,
    JobEvent,
    JobKind,
    JobState,
    Name,
    NumReplicas,
    Phase,
    Ref,
    RemoteUrl,
    Spec,
)


class Resource(BaseModel):
    """Base of everything that the API answers; read from rows by attribute."""

    model_config = ConfigDict(from_attributes=True, use_attribute_docstrings=True)


Item = TypeVar("Item", bound=Resource)


class Page(Resource, Generic[Item]):
    """A page of a list, newest first unless the route says otherwise."""

    data: list[Item]
    has_more: bool
    next: str | None = None
    """Cursor: `after` of the request for the next page."""


class JobResource(Resource):
    """A job."""

    id: str
    kind: JobKind
    name: str | None
    state: JobState
    phase: Phase | None
    """What a claimed job is doing, or was doing when it ended."""
    reason: FailReason | None
    """Why it failed."""
    message: str | None
    """The failure in words."""
    held_back: str | None = None
    """Why a queued job is passed over: its key runs as many as it may."""
    priority: int
    """Of the queued jobs of a kind the highest is claimed first, then the oldest."""
    attempt: int
    """Times that a worker has claimed it."""
    spec: dict[str, JsonValue]
    """As submitted."""
    depends_on: list[str]
    """Ids of the jobs whose output it uses."""
    result: dict[str, JsonValue] | None
    """Of a succeeded job: checkpoint_id and step, which it is of (train, export), saved_steps (train), evaluation_id and
    metrics (eval), dataset_id (annotate), ..."""
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None


class JobEventPage(Resource):
    """A page of a job's events, oldest first."""

    data: list[JobEvent]
    has_more: bool
    next: int
    """`after` of the request for the events that follow: the last `seq` that is known."""


class SubmittedJobs(Resource):
    """Answer of `POST /v1/jobs`."""

    jobs: list[JobResource]
    """In the order of the request."""


class CheckpointResource(Resource):
    """A published checkpoint."""

    id: str
    name: str | None
    job_id: str | None
    """The job that published it."""
    path: str
    """Folder, relative to TEVATRON_DATA."""
    sha256: str
    size_bytes: int
    contract: dict[str, JsonValue]
    """Its reranker.json."""
    created_at: datetime


HubId = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200),
]
"""A repository of the hub: owner/name."""
Revision = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]


class ModelRequest(Spec):
    """Register a base model: a folder that the operator allows, or a hub id where the hub is allowed."""

    name: Name
    path: str | None = Field(default=None, min_length=1, max_length=4096)
    """Absolute path of a folder in Hugging Face's layout under a configured root."""
    hub_id: HubId | None = None
    revision: Revision | None = None
    """Commit or tag of the hub id."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.hub_id is None):
            raise ValueError("expected exactly one of path and hub_id")
        if (self.hub_id is None) != (self.revision is None):
            raise ValueError("hub_id and revision go together")
        return self


class ModelResource(Resource):
    """A registered base model."""

    id: str
    name: str
    path: str | None
    hub_id: str | None
    revision: str | None
    sha256: str | None
    """Of the folder."""
    created_at: datetime


class DatasetKind(StrEnum):
    """What a dataset holds."""

    TRAINING = "training"
    """Training JSONL."""
    BEIR = "beir"
    """A BEIR folder: corpus.jsonl, queries.jsonl, qrels/<split>.tsv."""
    RANKLIST = "ranklist"
    """A run: 3 columns, or TREC's 6."""


class DatasetState(StrEnum):
    """Whether a dataset can be used: only a ready one is taken by a job."""

    AWAITING_CONTENT = "awaiting_content"
    """Registered without a path; its upload comes next."""
    READY = "ready"
    """Read from end to end, and hashed."""


class DatasetRequest(Spec):
    """Register a dataset: by a path, from the hub or a URL where it is allowed, or else its content is uploaded next."""

    name: Name
    kind: DatasetKind = Field(strict=False)
    path: str | None = Field(default=None, min_length=1, max_length=4096)
    """Absolute path under a configured root: a file, or a folder of kind beir."""
    hub_id: HubId | None = None
    """A dataset repository of the hub; of kind beir it is laid out as a BEIR folder."""
    revision: Revision | None = None
    """Commit, tag or branch of the hub id."""
    file: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._/-]*$", max_length=500
    )
    """Which file of the hub id; not of kind beir."""
    url: RemoteUrl | None = None
    """Under a prefix that the operator allows: a file, or a BEIR folder."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if sum(source is not None for source in (self.path, self.hub_id, self.url)) > 1:
            raise ValueError("expected one of path, hub_id and url, or none, got several")
        if (self.hub_id is None) != (self.revision is None):
            raise ValueError("hub_id and revision go together")
        needs_file = self.hub_id is not None and self.kind is not DatasetKind.BEIR
        if (self.file is not None) != needs_file:
            raise ValueError(
                "file goes with hub_id, and names the one that is meant unless kind is beir"
            )
        return self


class DatasetResource(Resource):
    """A registered dataset."""

    id: str
    name: str
    kind: DatasetKind
    state: DatasetState
    path: str
    """Relative to TEVATRON_DATA, or absolute under a configured root."""
    hub_id: str | None
    """Where it was fetched from, with the revision and the file."""
    revision: str | None
    file: str | None
    url: str | None
    """Where else it was fetched from."""
    sha256: str | None
    """Of the file or folder."""
    stats: dict[str, JsonValue]
    """training: rows, positives, negatives; ranklist: queries, rows; beir: documents, queries, splits."""
    created_at: datetime


class ScorerState(StrEnum):
    """States of a scorer; the last two are final."""

    WANTED = "wanted"
    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


class ScorerRequest(Spec):
    """Ask for a scorer of one checkpoint or model; an administrator may register an outside one by url."""

    name: Name | None = None
    checkpoint: Ref | None = None
    model: Ref | None = None
    """A registered model without a contract; needs prompt_template."""
    engine: EngineName = "hf"
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Arithmetic; the checkpoint's own when unset."""
    prompt_template: str | None = Field(default=None, max_length=100)
    max_length: int | None = Field(default=None, ge=16, le=131072)
    """Longest prompt of a model without a contract."""
    replicas: NumReplicas = 1
    """Servers that it has, each with a place of its own on a host."""
    ttl_s: float | None = Field(default=None, gt=0, le=30 * 86400)
    """How long it stays up without a job that uses it; the host's setting when unset."""
    url: str | None = Field(default=None, min_length=1, max_length=2000)
    """Outside scorer, under one of the operator's allowed prefixes."""
    token: str | None = Field(default=None, min_length=1, max_length=1000, repr=False)
    """Bearer token of the outside scorer; never shown again."""

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if sum(target is not None for target in (self.checkpoint, self.model, self.url)) != 1:
            raise ValueError("expected exactly one of checkpoint, model and url")
        if (self.model is None) != (self.prompt_template is None):
            raise ValueError("prompt_template goes with model, and only there")
        if self.token is not None and self.url is None:
            raise ValueError("token goes with url, and only there")
        if self.replicas != 1 and self.url is not None:
            raise ValueError(f"replicas goes with checkpoint or model, got {self.replicas} and url")
        return self


class ScorerReplica(Resource):
    """One server of a scorer."""

    id: str
    state: ScorerState
    url: str | None
    holder: str | None
    """The scorer host that serves it, or was the last to, as scorer@name:process."""
    error: str | None
    """Why it failed."""


class ScorerResource(Resource):
    """A scorer; its token is never shown."""

    id: str
    name: str | None
    state: ScorerState
    """Of the replica that is furthest, as are url, holder and error: ready as soon as one is."""
    replicas: int
    """How many were asked for."""
    ready_replicas: int
    """How many answer."""
    servers: list[ScorerReplica]
    """One for each replica."""
    checkpoint_id: str | None
    model_id: str | None
    engine: str | None
    dtype: str | None
    url: str | None
    holder: str | None
    external: bool
    """Registered by an administrator; every key sees it."""
    job_id: str | None
    """The job that asked for it."""
    ttl_s: float | None
    """How long it stays up without a job that uses it."""
    error: str | None
    created_at: datetime


class EvaluationResource(Resource):
    """Metrics of one run over one dataset."""

    id: str
    name: str | None
    job_id: str
    dataset_id: str
    split: str
    benchmark: dict[str, JsonValue] | None = None
    """Name and data set of the benchmark whose rules held."""
    first_stage: dict[str, JsonValue]
    rerank: dict[str, JsonValue] | None
    """None for a first stage alone."""
    checkpoint_id: str | None
    model_id: str | None
    metrics: dict[str, float]
    """Means over all queries of the qrels; a query without results counts 0."""
    num_queries: int
    variant: str
    """How the numbers were computed."""
    created_at: datetime


class MetricComparison(Resource):
    """One metric of two evaluations."""

    metric: str
    value: float
    """Mean of the evaluation."""
    baseline: float
    """Mean of the other one."""
    delta: float
    num_won: int
    """Queries whose value is higher than in the baseline."""
    num_lost: int
    num_same: int


class EvaluationComparison(Resource):
    """An evaluation against another one with the same judgments."""

    evaluation: EvaluationResource
    baseline: EvaluationResource
    metrics: list[MetricComparison]
    """Those that both have."""


class EvaluationValue(Resource):
    """One metric of one query."""

    query_id: str
    metric: str
    value: float
