"""What an attempt has run, and its deadlines, are counted by monotonic clocks; clocks that are set; retries in a row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("clocks", sa.JSON(), nullable=True))
    op.add_column("jobs", sa.Column("retries", sa.BigInteger(), nullable=False, server_default="0"))
    op.create_table(
        "clock_levels",
        sa.Column("boot", sa.String(64), primary_key=True),
        sa.Column("clock", sa.String(16), primary_key=True),
        sa.Column("level", sa.Double(), nullable=False),
        sa.Column("rests_until", sa.Double(), nullable=True),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("clock_levels")
    op.drop_column("jobs", "retries")
    op.drop_column("attempts", "clocks")
