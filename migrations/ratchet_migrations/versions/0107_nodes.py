"""Which node caused an attempt's end, the ranks that slow an attempt down, and what they are found by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0107"
down_revision = "0106"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("node", sa.BigInteger(), nullable=True))
    op.add_column("attempts", sa.Column("stragglers", sa.JSON(), nullable=True))
    op.add_column("attempt_nodes", sa.Column("times", sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column("attempt_nodes", "times")
    op.drop_column("attempts", "stragglers")
    op.drop_column("attempts", "node")
