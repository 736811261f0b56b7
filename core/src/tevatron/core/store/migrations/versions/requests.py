"""A running training may be asked for a state, or to end after its step."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_COLUMNS = ("save_requested_at", "stop_requested_at")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("jobs", sa.Column(name, sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    for name in reversed(_COLUMNS):
        op.drop_column("jobs", name)
