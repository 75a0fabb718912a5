"""Drops the table of clock levels, which nothing reads any more."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0103"
down_revision = "0102"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("clock_levels")


def downgrade() -> None:
    op.create_table(
        "clock_levels",
        sa.Column("boot", sa.String(64), nullable=False),
        sa.Column("clock", sa.String(16), nullable=False),
        sa.Column("level", sa.Double(), nullable=False),
        sa.Column("rests_until", sa.Double(), nullable=True),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("boot", "clock", name="pk_clock_levels"),
    )
