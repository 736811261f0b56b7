"""Webhooks and their deliveries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import SchemaItem

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def _owned(table: str) -> list[SchemaItem]:
    time = sa.DateTime(timezone=True)
    return [
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=True),
        sa.Column("created_at", time, server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["key_id"], ["api_keys.id"], name=f"fk_{table}_key_id_api_keys"),
        sa.PrimaryKeyConstraint("id", name=f"pk_{table}"),
    ]


def upgrade() -> None:
    time = sa.DateTime(timezone=True)
    op.create_table(
        "webhooks",
        *_owned("webhooks"),
        sa.Column("name", sa.Text(), nullable=True),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("secret", sa.Text(), nullable=False),
        sa.Column("disabled_at", time, nullable=True),
    )
    op.create_index("ix_webhooks_key_id_created_at_id", "webhooks", ["key_id", "created_at", "id"])
    state = sa.Enum(
        *("pending", "delivered", "failed"),
        name="state",
        native_enum=False,
        create_constraint=True,
        length=32,
    )
    op.create_table(
        "webhook_deliveries",
        *_owned("webhook_deliveries"),
        sa.Column("webhook_id", sa.Text(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=False),
        sa.Column("payload", postgresql.JSONB(astext_type=sa.Text()), nullable=False),
        sa.Column("state", state, server_default=sa.text("'pending'"), nullable=False),
        sa.Column("attempts", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("next_at", time, server_default=sa.text("now()"), nullable=False),
        sa.Column("last_error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["webhook_id"],
            ["webhooks.id"],
            name="fk_webhook_deliveries_webhook_id_webhooks",
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_webhook_deliveries_job_id_jobs"),
    )
    op.create_index(
        "ix_webhook_deliveries_webhook_id_created_at_id",
        "webhook_deliveries",
        ["webhook_id", "created_at", "id"],
    )
    op.create_index(
        "ix_webhook_deliveries_due",
        "webhook_deliveries",
        ["next_at"],
        postgresql_where=sa.text("state = 'pending'"),
    )


def downgrade() -> None:
    op.drop_table("webhook_deliveries")
    op.drop_table("webhooks")
