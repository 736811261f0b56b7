"""How many jobs of a key may be queued and run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_COLUMNS = ("max_queued", "max_running")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("api_keys", sa.Column(name, sa.BigInteger(), nullable=True))


def downgrade() -> None:
    for name in _COLUMNS:
        op.drop_column("api_keys", name)
