"""What liveness, budgets and goodput are told from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.add_column("attempts", sa.Column("pace", sa.JSON(), nullable=True))
    op.add_column("attempts", sa.Column("stop_at", _TIME, nullable=True))
    op.add_column("attempts", sa.Column("over_at", _TIME, nullable=True))
    op.add_column("jobs", sa.Column("paused_at", _TIME, nullable=True))
    op.add_column("jobs", sa.Column("paused_seconds", sa.Double(), nullable=False, server_default="0"))
    # Jobs that rest now: since their end, or since they were changed last.
    op.execute(
        "UPDATE jobs SET paused_at = coalesce(ended_at, updated_at) "
        "WHERE phase IN ('SUSPENDED', 'SUCCEEDED', 'FAILED', 'CANCELLED')"
    )


def downgrade() -> None:
    for table, column in (
        ("jobs", "paused_seconds"), ("jobs", "paused_at"),
        ("attempts", "over_at"), ("attempts", "stop_at"), ("attempts", "pace"),
    ):  # fmt: skip
        op.drop_column(table, column)
