"""The tables, as typed SQLAlchemy models; the migrations build the same (a test compares them).

Every row that belongs to a user carries `key_id`, the API key that made it; null means made without a key over loopback.
Names are labels: unique for datasets and models, and the newest one wins for jobs, checkpoints and scorers. Knows no
rule of a job's life: see lifecycle.py.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from pydantic import JsonValue
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Enum,
    ForeignKey,
    Identity,
    Index,
    MetaData,
    Text,
    UniqueConstraint,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from tevatron.core.contracts.jobs import EventType, FailReason, JobKind, JobState, Phase
from tevatron.core.contracts.resources import DatasetKind as DatasetKind
from tevatron.core.contracts.resources import DatasetState as DatasetState
from tevatron.core.contracts.resources import ScorerState as ScorerState
from tevatron.core.contracts.webhooks import DeliveryState

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class KeyRole(StrEnum):
    """What an API key may do; only an `admin` registers outside scorers."""

    USER = "user"
    ADMIN = "admin"


def _choice(kind: type[StrEnum], name: str, *, checked: bool = True) -> Enum:
    """Store an enum's values as text, under a CHECK where the list is closed."""
    return Enum(
        kind,
        name=name,
        native_enum=False,
        create_constraint=checked,
        length=32,
        values_callable=lambda members: [member.value for member in members],
    )


class Base(DeclarativeBase):
    """Root of all tables."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012  read by SQLAlchemy from the class
        str: Text,
        int: BigInteger,
        datetime: DateTime(timezone=True),
    }


class Owned:
    """Columns of everything that a user can list."""

    id: Mapped[str] = mapped_column(primary_key=True, sort_order=-3)
    key_id: Mapped[str | None] = mapped_column(ForeignKey("api_keys.id"), sort_order=-2)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now(), sort_order=-1)


class Leased:
    """Columns of what a process claims: see leases.py."""

    fence: Mapped[int] = mapped_column(server_default=text("0"))
    """Grows with every claim; a write that carries an older one is refused."""
    lease_until: Mapped[datetime | None]
    """Null while nobody holds the row."""
    holder: Mapped[str | None]
    """Name of the worker or host that claimed it last."""
    lost_attempts: Mapped[int] = mapped_column(server_default=text("0"))
    """Claims whose holder died."""


class ApiKey(Base):
    """A key; only the hash of its secret is kept."""

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str]
    prefix: Mapped[str]
    """First characters of the secret, for people."""
    secret_sha256: Mapped[str] = mapped_column(unique=True)
    role: Mapped[KeyRole] = mapped_column(_choice(KeyRole, "role"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    revoked_at: Mapped[datetime | None]
    last_used_at: Mapped[datetime | None]
    max_queued: Mapped[int | None]
    """Jobs that may be waiting or queued; a submission beyond it is refused."""
    max_running: Mapped[int | None]
    """Jobs that workers may hold at a time; others stay queued."""


class Login(Base):
    """A browser that has shown a key; only the hash of its cookie is kept."""

    __tablename__ = "logins"

    secret_sha256: Mapped[str] = mapped_column(primary_key=True)
    key_id: Mapped[str] = mapped_column(ForeignKey("api_keys.id"))
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime] = mapped_column(index=True)


class IdempotencyKey(Base):
    """What an Idempotency-Key has made."""

    __tablename__ = "idempotency_keys"
    __table_args__ = (UniqueConstraint("key_id", "key", postgresql_nulls_not_distinct=True),)

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    key_id: Mapped[str | None] = mapped_column(ForeignKey("api_keys.id"))
    key: Mapped[str]
    body_sha256: Mapped[str]
    job_ids: Mapped[list[str]] = mapped_column(JSONB)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Job(Owned, Leased, Base):
    """A job; while it is `queued` this row is the outbox too."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index(None, "kind", "state", "created_at"),
        Index(None, "key_id", "created_at", "id"),
        # For pages of all keys, and without a key: Postgres does not order by the index above under IS NULL.
        Index(None, "created_at", "id"),
        Index(None, "key_id", "name"),
        Index(None, "group_id"),
        Index(
            "ix_jobs_live",
            "state",
            "lease_until",
            postgresql_where=text("state NOT IN ('succeeded', 'failed', 'cancelled')"),
        ),
    )

    kind: Mapped[JobKind] = mapped_column(_choice(JobKind, "kind"))
    name: Mapped[str | None]
    priority: Mapped[int] = mapped_column(server_default=text("0"))
    group_id: Mapped[str | None]
    """Shared by the jobs of one submission of several."""
    state: Mapped[JobState] = mapped_column(_choice(JobState, "state"))
    phase: Mapped[Phase | None] = mapped_column(_choice(Phase, "phase", checked=False))
    reason: Mapped[FailReason | None] = mapped_column(_choice(FailReason, "reason", checked=False))
    message: Mapped[str | None]
    spec: Mapped[dict[str, JsonValue]] = mapped_column(JSONB)
    """As submitted."""
    resolved: Mapped[dict[str, JsonValue]] = mapped_column(JSONB)
    """With ids for names, and for `{from: name}` once the source has succeeded."""
    result: Mapped[dict[str, JsonValue] | None] = mapped_column(JSONB)
    attempt: Mapped[int] = mapped_column(server_default=text("0"))
    last_seq: Mapped[int] = mapped_column(server_default=text("0"))
    """Number of events so far."""
    published_at: Mapped[datetime | None]
    """When the last wake-up for this queued row went to the broker."""
    cancel_requested_at: Mapped[datetime | None]
    save_requested_at: Mapped[datetime | None]
    """When a state was last asked for in this attempt."""
    stop_requested_at: Mapped[datetime | None]
    """When the training was asked to end after its step; it holds for later attempts too."""
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class JobDependency(Base):
    """`job_id` waits for `source_id`, which its spec calls `source_name`."""

    __tablename__ = "job_dependencies"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    source_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True, index=True)
    source_name: Mapped[str]


class JobEventRow(Base):
    """One line of a job's history; `seq` counts from 1 without gaps."""

    __tablename__ = "job_events"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    time: Mapped[datetime]
    attempt: Mapped[int]
    type: Mapped[EventType] = mapped_column(_choice(EventType, "type"))
    data: Mapped[dict[str, JsonValue]] = mapped_column(JSONB)


class Webhook(Owned, Base):
    """Where the ends of a key's jobs are told."""

    __tablename__ = "webhooks"
    __table_args__ = (Index(None, "key_id", "created_at", "id"),)

    name: Mapped[str | None]
    url: Mapped[str]
    secret: Mapped[str]
    """Signs every delivery; shown once, when the webhook is made."""
    disabled_at: Mapped[datetime | None]
    """When its receiver answered 410 Gone."""


class WebhookDelivery(Owned, Base):
    """One event on its way to one webhook; its id is the `webhook-id` of every attempt."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index(None, "webhook_id", "created_at", "id"),
        Index("ix_webhook_deliveries_due", "next_at", postgresql_where=text("state = 'pending'")),
    )

    webhook_id: Mapped[str] = mapped_column(ForeignKey("webhooks.id", ondelete="CASCADE"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    payload: Mapped[dict[str, JsonValue]] = mapped_column(JSONB)
    state: Mapped[DeliveryState] = mapped_column(
        _choice(DeliveryState, "state"), server_default=text("'pending'")
    )
    attempts: Mapped[int] = mapped_column(server_default=text("0"))
    """Begun so far; it also fences: an outcome is written only while its attempt is the last one."""
    next_at: Mapped[datetime] = mapped_column(server_default=func.now())
    """When a pending one is sent, or sent again."""
    last_error: Mapped[str | None]


class Model(Owned, Base):
    """A base model: a folder, or a hub id at a revision."""

    __tablename__ = "models"
    __table_args__ = (
        UniqueConstraint("key_id", "name", postgresql_nulls_not_distinct=True),
        Index(None, "key_id", "created_at", "id"),
        CheckConstraint("(path IS NULL) <> (hub_id IS NULL)", name="place"),
    )

    name: Mapped[str]
    path: Mapped[str | None]
    """Key below TEVATRON_DATA, or absolute below a configured root."""
    hub_id: Mapped[str | None]
    hub_revision: Mapped[str | None]
    sha256: Mapped[str | None]
    """Of the folder; null for a hub id."""


class Dataset(Owned, Base):
    """A dataset: a file or folder, and where it was fetched from."""

    __tablename__ = "datasets"
    __table_args__ = (
        UniqueConstraint("key_id", "name", postgresql_nulls_not_distinct=True),
        Index(None, "key_id", "created_at", "id"),
    )

    name: Mapped[str]
    kind: Mapped[DatasetKind] = mapped_column(_choice(DatasetKind, "kind"))
    path: Mapped[str]
    """Key below TEVATRON_DATA, or absolute below a configured root."""
    hub_id: Mapped[str | None]
    """The hub's dataset repository that it was fetched from."""
    hub_revision: Mapped[str | None]
    hub_file: Mapped[str | None]
    """Which file of the repository; null for the whole of a BEIR folder."""
    url: Mapped[str | None]
    """Where else it was fetched from."""
    sha256: Mapped[str | None]
    """Of the file or folder; null while its content is to come."""
    stats: Mapped[dict[str, JsonValue]] = mapped_column(JSONB)
    """What was counted when it was read."""
    state: Mapped[DatasetState] = mapped_column(
        _choice(DatasetState, "state"), server_default=text("'ready'")
    )


class Checkpoint(Owned, Base):
    """A published checkpoint: one a job."""

    __tablename__ = "checkpoints"
    __table_args__ = (Index(None, "key_id", "created_at", "id"), Index(None, "key_id", "name"))

    name: Mapped[str | None]
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), unique=True)
    path: Mapped[str]
    """Key below TEVATRON_DATA."""
    contract: Mapped[dict[str, JsonValue]] = mapped_column(JSONB)
    """Its reranker.json."""
    sha256: Mapped[str]
    """Of the folder."""
    size_bytes: Mapped[int]


class Scorer(Owned, Leased, Base):
    """What should be served, and where it is: one server, claimed by a scorer host.

    A scorer with replicas is as many rows: all say the same of what is wanted, and each where its own server is.
    """

    __tablename__ = "scorers"
    __table_args__ = (
        UniqueConstraint("scorer_id", "replica"),
        Index(None, "key_id", "created_at", "id"),
        Index(None, "state", "created_at"),
        # A retried job finds its own scorer; those it has let go are history.
        Index(
            "uq_scorers_job_id",
            "job_id",
            unique=True,
            postgresql_where=text("state IN ('wanted', 'starting', 'ready') AND replica = 1"),
        ),
        CheckConstraint(
            "num_nonnulls(checkpoint_id, model_id) = CASE WHEN external THEN 0 ELSE 1 END",
            name="target",
        ),
        CheckConstraint("state <> 'ready' OR url IS NOT NULL", name="ready_has_url"),
    )

    scorer_id: Mapped[str] = mapped_column(ForeignKey("scorers.id"))
    """The scorer that it is a replica of: itself for the first, whose id users know."""
    replica: Mapped[int] = mapped_column(server_default=text("1"))
    """Counts from 1."""
    name: Mapped[str | None]
    state: Mapped[ScorerState] = mapped_column(_choice(ScorerState, "state"))
    job_id: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    """The job that asked for it, and lets it go."""
    external: Mapped[bool] = mapped_column(server_default=text("false"))
    """An outside URL that an administrator registered; no host claims it, and every key sees it."""
    checkpoint_id: Mapped[str | None] = mapped_column(ForeignKey("checkpoints.id"))
    model_id: Mapped[str | None] = mapped_column(ForeignKey("models.id"))
    engine: Mapped[str]
    dtype: Mapped[str | None]
    prompt_template: Mapped[str | None]
    max_length: Mapped[int | None]
    ttl_s: Mapped[float | None]
    """Seconds without use after which it is stopped; null for never, or with its job."""
    last_used_at: Mapped[datetime] = mapped_column(server_default=func.now())
    url: Mapped[str | None]
    token: Mapped[str | None]
    """Bearer token of its HTTP interface; never shown by the API."""
    error: Mapped[str | None]
    info: Mapped[dict[str, JsonValue] | None] = mapped_column(JSONB)
    """Its ScorerInfo once ready."""
    ready_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]


class Evaluation(Owned, Base):
    """Means of the metrics of one run: one row a job."""

    __tablename__ = "evaluations"
    __table_args__ = (Index(None, "key_id", "created_at", "id"), Index(None, "dataset_id"))

    name: Mapped[str | None]
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), unique=True)
    dataset_id: Mapped[str] = mapped_column(ForeignKey("datasets.id"))
    split: Mapped[str]
    benchmark: Mapped[dict[str, JsonValue] | None] = mapped_column(JSONB)
    """Name and data set of the benchmark whose rules held."""
    first_stage: Mapped[dict[str, JsonValue]] = mapped_column(JSONB)
    rerank: Mapped[dict[str, JsonValue] | None] = mapped_column(JSONB)
    checkpoint_id: Mapped[str | None] = mapped_column(ForeignKey("checkpoints.id"))
    model_id: Mapped[str | None] = mapped_column(ForeignKey("models.id"))
    metrics: Mapped[dict[str, float]] = mapped_column(JSONB)
    """Metric name to mean over all queries of the qrels."""
    num_queries: Mapped[int]
    variant: Mapped[str]
    """How the numbers were computed, e.g. `pytrec_eval 0.5.10, missing queries 0`."""
    run_sha256: Mapped[str]
    qrels_sha256: Mapped[str]


class EvaluationValue(Base):
    """One metric of one query."""

    __tablename__ = "evaluation_values"
    __table_args__ = (
        # NaN sorts above every number in Postgres, so this refuses it too.
        CheckConstraint("value >= 0 AND value <= 1", name="range"),
    )

    evaluation_id: Mapped[str] = mapped_column(ForeignKey("evaluations.id"), primary_key=True)
    metric: Mapped[str] = mapped_column(primary_key=True)
    query_id: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]
