"""A dataset from the hub lies here like any other, and says where it came from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_constraint(op.f("ck_datasets_place"), "datasets", type_="check")
    op.alter_column("datasets", "path", nullable=False)
    op.add_column("datasets", sa.Column("hub_file", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("datasets", "hub_file")
    op.alter_column("datasets", "path", nullable=True)
    op.create_check_constraint(
        op.f("ck_datasets_place"), "datasets", "(path IS NULL) <> (hub_id IS NULL)"
    )
