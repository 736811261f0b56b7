"""A scorer may have several replicas: each is a row, of which one host at a time serves one."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_ONE_A_JOB = "uq_scorers_job_id"
_LIVE = "state IN ('wanted', 'starting', 'ready')"


def upgrade() -> None:
    op.add_column("scorers", sa.Column("scorer_id", sa.Text(), nullable=True))
    op.execute("UPDATE scorers SET scorer_id = id")
    op.alter_column("scorers", "scorer_id", nullable=False)
    op.create_foreign_key(
        "fk_scorers_scorer_id_scorers", "scorers", "scorers", ["scorer_id"], ["id"]
    )
    op.add_column(
        "scorers",
        sa.Column("replica", sa.BigInteger(), server_default=sa.text("1"), nullable=False),
    )
    op.create_unique_constraint("uq_scorers_scorer_id_replica", "scorers", ["scorer_id", "replica"])
    _one_live_scorer_a_job(f"{_LIVE} AND replica = 1")


def downgrade() -> None:
    op.execute("DELETE FROM scorers WHERE replica > 1")
    _one_live_scorer_a_job(_LIVE)
    op.drop_constraint("uq_scorers_scorer_id_replica", "scorers", type_="unique")
    op.drop_column("scorers", "replica")
    op.drop_constraint("fk_scorers_scorer_id_scorers", "scorers", type_="foreignkey")
    op.drop_column("scorers", "scorer_id")


def _one_live_scorer_a_job(where: str) -> None:
    op.drop_index(_ONE_A_JOB, table_name="scorers")
    op.create_index(_ONE_A_JOB, "scorers", ["job_id"], unique=True, postgresql_where=sa.text(where))
