"""What attempts found when they did steps again; values of metrics that such steps replaced."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("redone", sa.JSON(), nullable=True))
    op.add_column("attempts", sa.Column("metrics_differ", sa.JSON(), nullable=True))
    op.create_table(
        "superseded_metrics",
        sa.Column("job_id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_superseded_metrics_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "name", "step", "epoch", name="pk_superseded_metrics"),
    )


def downgrade() -> None:
    op.drop_table("superseded_metrics")
    op.drop_column("attempts", "metrics_differ")
    op.drop_column("attempts", "redone")
