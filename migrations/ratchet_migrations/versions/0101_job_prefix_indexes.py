"""Indexes for the search of jobs by the beginning of a name or id, on PostgreSQL; SQLite's other indexes serve it."""

from __future__ import annotations

from alembic import op

revision = "0101"
down_revision = "0100"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for column in ("name", "id"):
            op.create_index(f"ix_jobs_{column}_prefix", "jobs", [column], postgresql_ops={column: "text_pattern_ops"})


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        for column in ("name", "id"):
            op.drop_index(f"ix_jobs_{column}_prefix", "jobs")
