"""Throughput: the newest measurement of steps per second, of jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("steps_per_second", sa.Double(), nullable=True))


def downgrade() -> None:
    op.drop_column("jobs", "steps_per_second")
