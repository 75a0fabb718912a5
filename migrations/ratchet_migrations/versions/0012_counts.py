"""What an attempt has run is counted by monotonic clocks; retries in a row are counted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("run_clock", sa.JSON(), nullable=True))
    op.add_column("jobs", sa.Column("retries", sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("jobs", "retries")
    op.drop_column("attempts", "run_clock")
