"""A dataset that was fetched from a URL says from which."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("datasets", sa.Column("url", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("datasets", "url")
