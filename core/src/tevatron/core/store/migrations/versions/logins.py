"""Browsers that are logged in to the dashboard."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "logins",
        sa.Column("secret_sha256", sa.Text(), nullable=False),
        sa.Column("key_id", sa.Text(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["key_id"], ["api_keys.id"], name=op.f("fk_logins_key_id_api_keys")
        ),
        sa.PrimaryKeyConstraint("secret_sha256", name=op.f("pk_logins")),
    )
    op.create_index(op.f("ix_logins_expires_at"), "logins", ["expires_at"])


def downgrade() -> None:
    op.drop_table("logins")
