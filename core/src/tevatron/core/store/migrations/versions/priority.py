"""Queued jobs are claimed by priority."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    priority = sa.Column("priority", sa.BigInteger(), server_default=sa.text("0"), nullable=False)
    op.add_column("jobs", priority)


def downgrade() -> None:
    op.drop_column("jobs", "priority")
