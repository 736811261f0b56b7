"""All tables of the main road."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("prefix", sa.Text(), nullable=False),
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column(
            "role",
            sa.Enum(
                "user", "admin", name="role", native_enum=False, create_constraint=True, length=32
            ),
            nullable=False,
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.UniqueConstraint("secret_sha256", name="uq_api_keys_secret_sha256"),
    )
    op.create_table(
        "datasets",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column(
            "kind",
            sa.Enum(
                "training",
                "beir",
                "ranklist",
                name="kind",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("hub_id", sa.Text(), nullable=True),
        sa.Column("hub_revision", sa.Text(), nullable=True),
        sa.Column("sha256", sa.Text(), nullable=True),
        sa.Column("stats", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column(
            "state",
            sa.Enum(
                "awaiting_content",
                "ready",
                name="state",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            server_default=sa.text("'ready'"),
            nullable=False,
        ),
        sa.CheckConstraint("(path IS NULL) <> (hub_id IS NULL)", name=op.f("ck_datasets_place")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_datasets_key_id_api_keys"),
        sa.PrimaryKeyConstraint("id", name="pk_datasets"),
        sa.UniqueConstraint(
            "key_id", "name", name="uq_datasets_key_id_name", postgresql_nulls_not_distinct=True
        ),
    )
    op.create_index(
        "ix_datasets_key_id_created_at_id", "datasets", ["key_id", "created_at", "id"], unique=False
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("body_sha256", sa.Text(), nullable=False),
        sa.Column("job_ids", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.ForeignKeyConstraint(
            ["key_id"], ["api_keys.id"], name="fk_idempotency_keys_key_id_api_keys"
        ),
        sa.PrimaryKeyConstraint("id", name="pk_idempotency_keys"),
        sa.UniqueConstraint(
            "key_id",
            "key",
            name="uq_idempotency_keys_key_id_key",
            postgresql_nulls_not_distinct=True,
        ),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column(
            "kind",
            sa.Enum(
                "train",
                "export",
                "eval",
                name="kind",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("group_id", sa.Text(), nullable=True),
        sa.Column(
            "state",
            sa.Enum(
                "waiting",
                "queued",
                "starting",
                "running",
                "cancelling",
                "cancelled",
                "succeeded",
                "failed",
                name="state",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column(
            "phase",
            sa.Enum(
                "preparing",
                "loading",
                "training",
                "saving",
                "exporting",
                "publishing",
                "retrieving",
                "waiting_for_scorer",
                "scoring",
                "evaluating",
                name="phase",
                native_enum=False,
                length=32,
            ),
            nullable=True,
        ),
        sa.Column(
            "reason",
            sa.Enum(
                "dependency_failed",
                "config_error",
                "data_error",
                "model_error",
                "contract_mismatch",
                "out_of_memory",
                "scorer_failed",
                "not_finite",
                "worker_lost",
                "program_failed",
                "internal_error",
                name="reason",
                native_enum=False,
                length=32,
            ),
            nullable=True,
        ),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("spec", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("resolved", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("result", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("attempt", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("last_seq", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("published_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("holder", sa.Text(), nullable=True),
        sa.Column("lost_attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_jobs_key_id_api_keys"),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_group_id", "jobs", ["group_id"], unique=False)
    op.create_index(
        "ix_jobs_key_id_created_at_id", "jobs", ["key_id", "created_at", "id"], unique=False
    )
    op.create_index("ix_jobs_key_id_name", "jobs", ["key_id", "name"], unique=False)
    op.create_index("ix_jobs_created_at_id", "jobs", ["created_at", "id"], unique=False)
    op.create_index(
        "ix_jobs_kind_state_created_at", "jobs", ["kind", "state", "created_at"], unique=False
    )
    op.create_index(
        "ix_jobs_live",
        "jobs",
        ["state", "lease_until"],
        unique=False,
        postgresql_where=sa.text("state NOT IN ('succeeded', 'failed', 'cancelled')"),
    )
    op.create_table(
        "models",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=True),
        sa.Column("hub_id", sa.Text(), nullable=True),
        sa.Column("hub_revision", sa.Text(), nullable=True),
        sa.Column("sha256", sa.Text(), nullable=True),
        sa.CheckConstraint("(path IS NULL) <> (hub_id IS NULL)", name=op.f("ck_models_place")),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_models_key_id_api_keys"),
        sa.PrimaryKeyConstraint("id", name="pk_models"),
        sa.UniqueConstraint(
            "key_id", "name", name="uq_models_key_id_name", postgresql_nulls_not_distinct=True
        ),
    )
    op.create_index(
        "ix_models_key_id_created_at_id", "models", ["key_id", "created_at", "id"], unique=False
    )
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("contract", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_checkpoints_job_id_jobs"),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_checkpoints_key_id_api_keys"),
        sa.PrimaryKeyConstraint("id", name="pk_checkpoints"),
        sa.UniqueConstraint("job_id", name="uq_checkpoints_job_id"),
    )
    op.create_index(
        "ix_checkpoints_key_id_created_at_id",
        "checkpoints",
        ["key_id", "created_at", "id"],
        unique=False,
    )
    op.create_index("ix_checkpoints_key_id_name", "checkpoints", ["key_id", "name"], unique=False)
    op.create_table(
        "job_dependencies",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("source_id", sa.Text(), nullable=False),
        sa.Column("source_name", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_dependencies_job_id_jobs"),
        sa.ForeignKeyConstraint(
            ["source_id"], ["jobs.id"], name="fk_job_dependencies_source_id_jobs"
        ),
        sa.PrimaryKeyConstraint("job_id", "source_id", name="pk_job_dependencies"),
    )
    op.create_index(
        "ix_job_dependencies_source_id", "job_dependencies", ["source_id"], unique=False
    )
    op.create_table(
        "job_events",
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column(
            "type",
            sa.Enum(
                "state",
                "phase",
                "progress",
                "metrics",
                "log",
                name="type",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("data", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_events_job_id_jobs"),
        sa.PrimaryKeyConstraint("job_id", "seq", name="pk_job_events"),
    )
    op.create_table(
        "evaluations",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.Column("split", sa.Text(), nullable=False),
        sa.Column("first_stage", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("rerank", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("checkpoint_id", sa.Text(), nullable=True),
        sa.Column("model_id", sa.Text(), nullable=True),
        sa.Column("metrics", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("num_queries", sa.BigInteger(), nullable=False),
        sa.Column("variant", sa.Text(), nullable=False),
        sa.Column("run_sha256", sa.Text(), nullable=False),
        sa.Column("qrels_sha256", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name="fk_evaluations_checkpoint_id_checkpoints"
        ),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name="fk_evaluations_dataset_id_datasets"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_evaluations_job_id_jobs"),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_evaluations_key_id_api_keys"),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name="fk_evaluations_model_id_models"),
        sa.PrimaryKeyConstraint("id", name="pk_evaluations"),
        sa.UniqueConstraint("job_id", name="uq_evaluations_job_id"),
    )
    op.create_index("ix_evaluations_dataset_id", "evaluations", ["dataset_id"], unique=False)
    op.create_index(
        "ix_evaluations_key_id_created_at_id",
        "evaluations",
        ["key_id", "created_at", "id"],
        unique=False,
    )
    op.create_table(
        "scorers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column(
            "state",
            sa.Enum(
                "wanted",
                "starting",
                "ready",
                "stopping",
                "stopped",
                "failed",
                name="state",
                native_enum=False,
                create_constraint=True,
                length=32,
            ),
            nullable=False,
        ),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("external", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("checkpoint_id", sa.Text(), nullable=True),
        sa.Column("model_id", sa.Text(), nullable=True),
        sa.Column("engine", sa.Text(), nullable=False),
        sa.Column("dtype", sa.Text(), nullable=True),
        sa.Column("prompt_template", sa.Text(), nullable=True),
        sa.Column("max_length", sa.BigInteger(), nullable=True),
        sa.Column("ttl_s", sa.Double(), nullable=True),
        sa.Column(
            "last_used_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("url", sa.Text(), nullable=True),
        sa.Column("token", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("info", postgresql.JSONB(astext_type=sa.Text()), nullable=True),
        sa.Column("ready_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("fence", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("holder", sa.Text(), nullable=True),
        sa.Column("lost_attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.CheckConstraint(
            "state <> 'ready' OR url IS NOT NULL", name=op.f("ck_scorers_ready_has_url")
        ),
        sa.CheckConstraint(
            "num_nonnulls(checkpoint_id, model_id) = CASE WHEN external THEN 0 ELSE 1 END",
            name=op.f("ck_scorers_target"),
        ),
        sa.ForeignKeyConstraint(
            ["checkpoint_id"], ["checkpoints.id"], name="fk_scorers_checkpoint_id_checkpoints"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_scorers_job_id_jobs"),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name="fk_scorers_key_id_api_keys"),
        sa.ForeignKeyConstraint(["model_id"], ["models.id"], name="fk_scorers_model_id_models"),
        sa.PrimaryKeyConstraint("id", name="pk_scorers"),
    )
    op.create_index(
        "ix_scorers_key_id_created_at_id", "scorers", ["key_id", "created_at", "id"], unique=False
    )
    op.create_index("ix_scorers_state_created_at", "scorers", ["state", "created_at"], unique=False)
    op.create_index(
        "uq_scorers_job_id",
        "scorers",
        ["job_id"],
        unique=True,
        postgresql_where=sa.text("state IN ('wanted', 'starting', 'ready')"),
    )
    op.create_table(
        "evaluation_values",
        sa.Column("evaluation_id", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("query_id", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=False),
        sa.CheckConstraint("value >= 0 AND value <= 1", name=op.f("ck_evaluation_values_range")),
        sa.ForeignKeyConstraint(
            ["evaluation_id"],
            ["evaluations.id"],
            name="fk_evaluation_values_evaluation_id_evaluations",
        ),
        sa.PrimaryKeyConstraint("evaluation_id", "metric", "query_id", name="pk_evaluation_values"),
    )


def downgrade() -> None:
    op.drop_table("evaluation_values")
    op.drop_index(
        "uq_scorers_job_id",
        table_name="scorers",
        postgresql_where=sa.text("state IN ('wanted', 'starting', 'ready')"),
    )
    op.drop_index("ix_scorers_state_created_at", table_name="scorers")
    op.drop_index("ix_scorers_key_id_created_at_id", table_name="scorers")
    op.drop_table("scorers")
    op.drop_index("ix_evaluations_key_id_created_at_id", table_name="evaluations")
    op.drop_index("ix_evaluations_dataset_id", table_name="evaluations")
    op.drop_table("evaluations")
    op.drop_table("job_events")
    op.drop_index("ix_job_dependencies_source_id", table_name="job_dependencies")
    op.drop_table("job_dependencies")
    op.drop_index("ix_checkpoints_key_id_name", table_name="checkpoints")
    op.drop_index("ix_checkpoints_key_id_created_at_id", table_name="checkpoints")
    op.drop_table("checkpoints")
    op.drop_index("ix_models_key_id_created_at_id", table_name="models")
    op.drop_table("models")
    op.drop_index(
        "ix_jobs_live",
        table_name="jobs",
        postgresql_where=sa.text("state NOT IN ('succeeded', 'failed', 'cancelled')"),
    )
    op.drop_index("ix_jobs_kind_state_created_at", table_name="jobs")
    op.drop_index("ix_jobs_created_at_id", table_name="jobs")
    op.drop_index("ix_jobs_key_id_name", table_name="jobs")
    op.drop_index("ix_jobs_key_id_created_at_id", table_name="jobs")
    op.drop_index("ix_jobs_group_id", table_name="jobs")
    op.drop_table("jobs")
    op.drop_table("idempotency_keys")
    op.drop_index("ix_datasets_key_id_created_at_id", table_name="datasets")
    op.drop_table("datasets")
    op.drop_table("api_keys")
