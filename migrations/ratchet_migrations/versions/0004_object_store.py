"""Object stores: where a checkpoint's copy lies, and since when it is whole."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("uri", sa.String(2000), nullable=True))
    op.add_column("checkpoints", sa.Column("uploaded_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("checkpoints", "uploaded_at")
    op.drop_column("checkpoints", "uri")
