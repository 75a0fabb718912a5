"""Export to experiment trackers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0106"
down_revision = "0105"
branch_labels = None
depends_on = None

_BIG, _JSON, _TIME = sa.BigInteger(), sa.JSON(), sa.DateTime(timezone=True)
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "trackers",
        sa.Column("name", sa.String(16), nullable=False),
        sa.Column("lease_owner", sa.String(128), nullable=True),
        sa.Column("lease_token", sa.String(64), nullable=True),
        sa.Column("lease_expires_at", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("name", name="pk_trackers"),
    )
    op.create_table(
        "tracker_runs",
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("sink", sa.String(16), nullable=False),
        sa.Column("number", _BIG, nullable=False),
        sa.Column("live", sa.Boolean(), nullable=False),
        sa.Column("done", sa.Boolean(), nullable=False),
        sa.Column("first_attempt", _BIG, nullable=False),
        sa.Column("last_attempt", _BIG, nullable=True),
        sa.Column("base_step", _BIG, nullable=False),
        sa.Column("facts", _JSON, nullable=True),
        sa.Column("state", _JSON, nullable=False),
        sa.Column("marks", _JSON, nullable=False),
        sa.Column("sent_row", _BIG, nullable=False),
        sa.Column("sent_step", _BIG, nullable=False),
        sa.Column("event", _BIG, nullable=False),
        sa.Column("ended_attempt", _BIG, nullable=False),
        sa.Column("redone_until", _BIG, nullable=False),
        sa.Column("ended_at", _TIME, nullable=True),
        sa.Column("batch", _JSON, nullable=True),
        sa.Column("seen", sa.String(128), nullable=True),
        sa.Column("failures", _BIG, nullable=False),
        sa.Column("failing_since", _TIME, nullable=True),
        sa.Column("next_try", _TIME, nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_tracker_runs_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "sink", "number", name="pk_tracker_runs"),
    )
    op.create_index("ix_tracker_runs_sink_done", "tracker_runs", ["sink", "done"])
    op.create_table(
        "tracker_outbox",
        sa.Column("id", _ID, nullable=False),
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("attempt", _BIG, nullable=False),
        sa.Column("step", _BIG, nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("points", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_tracker_outbox_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_tracker_outbox"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_tracker_outbox_job_id_step_id", "tracker_outbox", ["job_id", "step", "id"])


def downgrade() -> None:
    op.drop_table("tracker_outbox")
    op.drop_table("tracker_runs")
    op.drop_table("trackers")
