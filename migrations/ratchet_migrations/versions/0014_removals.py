"""Checkpoints that are deleted, and whose files may still be there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("removing_since", sa.DateTime(timezone=True), nullable=True))
    op.create_index(
        "ix_checkpoints_removing_since",
        "checkpoints",
        ["removing_since"],
        unique=False,
        sqlite_where=sa.text("removing_since IS NOT NULL"),
        postgresql_where=sa.text("removing_since IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_checkpoints_removing_since", "checkpoints")
    op.drop_column("checkpoints", "removing_since")
