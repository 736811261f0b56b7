"""Jobs of kind `annotate`; which benchmark an evaluation is of."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_KINDS = ("train", "export", "eval")


def upgrade() -> None:
    _allow((*_KINDS, "annotate"))
    benchmark = sa.Column("benchmark", postgresql.JSONB(astext_type=sa.Text()), nullable=True)
    op.add_column("evaluations", benchmark)


def downgrade() -> None:
    op.drop_column("evaluations", "benchmark")
    # A build without the kind can neither run these jobs nor show them.
    op.execute(
        "DELETE FROM job_events WHERE job_id IN (SELECT id FROM jobs WHERE kind = 'annotate')"
    )
    op.execute(
        "DELETE FROM job_dependencies USING jobs WHERE kind = 'annotate' AND id IN (job_id, source_id)"
    )
    op.execute(
        "UPDATE scorers SET job_id = NULL WHERE job_id IN (SELECT id FROM jobs WHERE kind = 'annotate')"
    )
    op.execute("DELETE FROM jobs WHERE kind = 'annotate'")
    _allow(_KINDS)


def _allow(kinds: tuple[str, ...]) -> None:
    op.drop_constraint(op.f("ck_jobs_kind"), "jobs", type_="check")
    listed = ", ".join(f"'{kind}'" for kind in kinds)
    op.create_check_constraint(op.f("ck_jobs_kind"), "jobs", f"kind IN ({listed})")
