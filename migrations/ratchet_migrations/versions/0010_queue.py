"""The queue by owner, for whom room has been made, and which host lends its slots."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_QUEUE = ["phase", "owner", "priority", "created_at", "id"]
_PARTIAL = [
    ("ix_jobs_room_since", ["room_since"], "room_since IS NOT NULL"),
    ("ix_jobs_queued", ["phase", "reason", "not_before"], "phase = 'QUEUED'"),
]


def upgrade() -> None:
    op.add_column("jobs", sa.Column("room_since", _TIME, nullable=True))
    op.create_index("ix_jobs_phase_owner_priority_created_at_id", "jobs", _QUEUE)
    for name, columns, which in _PARTIAL:
        where = sa.text(which)
        op.create_index(name, "jobs", columns, sqlite_where=where, postgresql_where=where)
    op.create_table(
        "slot_host",
        sa.Column("id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("slot_host")
    for name, _, _ in _PARTIAL:
        op.drop_index(name, table_name="jobs")
    op.drop_index("ix_jobs_phase_owner_priority_created_at_id", table_name="jobs")
    op.drop_column("jobs", "room_since")
