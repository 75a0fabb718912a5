"""Lists of jobs that stay quick: each filter in the order of creation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_BY = ("phase", "name", "owner")


def upgrade() -> None:
    for column in _BY:
        op.create_index(f"ix_jobs_{column}_created_at_id", "jobs", [column, "created_at", "id"])
    some = sa.text("ttl IS NOT NULL")
    op.create_index("ix_jobs_ttl", "jobs", ["ttl"], sqlite_where=some, postgresql_where=some)
    with op.batch_alter_table("job_labels") as table:
        table.add_column(sa.Column("created_at", sa.DateTime(timezone=True), nullable=True))
    op.execute("UPDATE job_labels SET created_at = (SELECT created_at FROM jobs WHERE jobs.id = job_labels.job_id)")
    with op.batch_alter_table("job_labels") as table:
        # The default is for replicas of the version before, which run on until they are replaced.
        now = sa.func.now()
        table.alter_column("created_at", existing_type=sa.DateTime(timezone=True), nullable=False, server_default=now)
    op.drop_index("ix_job_labels_key_value", table_name="job_labels")
    op.create_index("ix_job_labels_key_value_created_at", "job_labels", ["key", "value", "created_at", "job_id"])


def downgrade() -> None:
    op.drop_index("ix_job_labels_key_value_created_at", table_name="job_labels")
    op.create_index("ix_job_labels_key_value", "job_labels", ["key", "value"])
    with op.batch_alter_table("job_labels") as table:
        table.drop_column("created_at")
    op.drop_index("ix_jobs_ttl", table_name="jobs")
    for column in _BY:
        op.drop_index(f"ix_jobs_{column}_created_at_id", table_name="jobs")
