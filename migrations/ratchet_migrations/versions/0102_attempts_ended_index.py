"""An index of the attempts by the time of their end, for figures of all jobs together."""

from __future__ import annotations

from alembic import op

revision = "0102"
down_revision = "0101"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_attempts_ended_at", "attempts", ["ended_at", "cause", "job_id", "number"])


def downgrade() -> None:
    op.drop_index("ix_attempts_ended_at", "attempts")
