"""Several nodes: where each is reached, and when an attempt that may have waited in an engine's queue has begun."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempt_nodes", sa.Column("address", sa.String(255), nullable=True))
    op.add_column("attempts", sa.Column("begun_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "begun_at")
    op.drop_column("attempt_nodes", "address")
