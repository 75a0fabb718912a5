"""All tables of version 0.1.0. Databases of development versions (revisions 0001 to 0014) are refused."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0100"
down_revision = None
branch_labels = None
depends_on = None

_BIG, _JSON, _TIME = sa.BigInteger(), sa.JSON(), sa.DateTime(timezone=True)
_REAL: sa.Double[float] = sa.Double()
_REFUSED = "events are only ever added"
_ADD_ONLY = f"""
CREATE FUNCTION ratchet_events_add_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND NOT EXISTS (SELECT 1 FROM jobs WHERE id = OLD.job_id) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION '{_REFUSED}';
END
$$
"""


def upgrade() -> None:
    op.create_table(
        "api_tokens",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("owner", sa.String(63), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("scopes", _JSON, nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("created_by", sa.String(63), nullable=False),
        sa.Column("made_with", sa.String(16), nullable=True),
        sa.Column("expires_at", _TIME, nullable=True),
        sa.Column("revoked_at", _TIME, nullable=True),
        sa.Column("last_used_at", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_api_tokens"),
        sa.UniqueConstraint("token_hash", name="uq_api_tokens_token_hash"),
    )
    op.create_index("ix_api_tokens_made_with", "api_tokens", ["made_with"], unique=False)
    op.create_table(
        "clock_levels",
        sa.Column("boot", sa.String(64), nullable=False),
        sa.Column("clock", sa.String(16), nullable=False),
        sa.Column("level", _REAL, nullable=False),
        sa.Column("rests_until", _REAL, nullable=True),
        sa.Column("seen_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("boot", "clock", name="pk_clock_levels"),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("scope", sa.String(64), nullable=False),
        sa.Column("key", sa.String(255), nullable=False),
        sa.Column("body_hash", sa.String(64), nullable=False),
        sa.Column("token", sa.String(32), nullable=False),
        sa.Column("status", _BIG, nullable=True),
        sa.Column("headers", _JSON, nullable=False),
        sa.Column("body", sa.Text(), nullable=True),
        sa.Column("created_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("scope", "key", name="pk_idempotency_keys"),
    )
    op.create_index("ix_idempotency_keys_created_at", "idempotency_keys", ["created_at"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("owner", sa.String(63), server_default="local", nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("desired", sa.String(16), nullable=False),
        sa.Column("desired_cause", sa.String(32), nullable=True),
        sa.Column("desired_at", _TIME, nullable=True),
        sa.Column("reason", sa.String(64), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("spec", _JSON, nullable=False),
        sa.Column("resolved", _JSON, nullable=False),
        sa.Column("warnings", _JSON, nullable=False),
        sa.Column("spec_digest", sa.String(64), nullable=False),
        sa.Column("priority", _BIG, nullable=False),
        sa.Column("version", _BIG, nullable=False),
        sa.Column("attempt", _BIG, nullable=False),
        sa.Column("step", _BIG, nullable=False),
        sa.Column("total_steps", _BIG, nullable=True),
        sa.Column("data_epoch", _BIG, nullable=True),
        sa.Column("steps_per_second", _REAL, nullable=True),
        sa.Column("committed_step", _BIG, nullable=False),
        sa.Column("committed_attempt", _BIG, nullable=True),
        sa.Column("checkpoint_request", _BIG, nullable=False),
        sa.Column("preemptions", _BIG, nullable=False),
        sa.Column("failures", _BIG, nullable=False),
        sa.Column("attempts_without_progress", _BIG, nullable=False),
        sa.Column("retries", _BIG, server_default="0", nullable=False),
        sa.Column("not_before", _TIME, nullable=True),
        sa.Column("preempting_since", _TIME, nullable=True),
        sa.Column("running_seconds", _REAL, nullable=False),
        sa.Column("lease_owner", sa.String(128), nullable=True),
        sa.Column("lease_token", sa.String(64), nullable=True),
        sa.Column("lease_expires_at", _TIME, nullable=True),
        sa.Column("ttl", _REAL, nullable=True),
        sa.Column("forked_from", sa.String(96), nullable=True),
        sa.Column("fork_source", _JSON, nullable=True),
        sa.Column("resume_from", _JSON, nullable=True),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.Column("started_at", _TIME, nullable=True),
        sa.Column("ended_at", _TIME, nullable=True),
        sa.Column("paused_at", _TIME, nullable=True),
        sa.Column("paused_seconds", _REAL, server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_created_at_id", "jobs", ["created_at", "id"], unique=False)
    op.create_index("ix_jobs_name_created_at_id", "jobs", ["name", "created_at", "id"], unique=False)
    op.create_index("ix_jobs_name_id", "jobs", ["name", "id"], unique=False)
    op.create_index("ix_jobs_owner_created_at_id", "jobs", ["owner", "created_at", "id"], unique=False)
    op.create_index("ix_jobs_phase_created_at_id", "jobs", ["phase", "created_at", "id"], unique=False)
    op.create_index("ix_jobs_phase_not_before", "jobs", ["phase", "not_before"], unique=False)
    op.create_index(
        "ix_jobs_phase_owner_priority_created_at_id",
        "jobs",
        ["phase", "owner", "priority", "created_at", "id"],
        unique=False,
    )
    op.create_index("ix_jobs_priority_id", "jobs", ["priority", "id"], unique=False)
    op.create_index(
        "ix_jobs_queued",
        "jobs",
        ["phase", "reason", "not_before"],
        unique=False,
        sqlite_where=sa.text("phase = 'QUEUED'"),
        postgresql_where=sa.text("phase = 'QUEUED'"),
    )
    op.create_index(
        "ix_jobs_preempting_since",
        "jobs",
        ["preempting_since"],
        unique=False,
        sqlite_where=sa.text("preempting_since IS NOT NULL"),
        postgresql_where=sa.text("preempting_since IS NOT NULL"),
    )
    op.create_index(
        "ix_jobs_ttl",
        "jobs",
        ["ttl"],
        unique=False,
        sqlite_where=sa.text("ttl IS NOT NULL"),
        postgresql_where=sa.text("ttl IS NOT NULL"),
    )
    op.create_table(
        "quotas",
        sa.Column("owner", sa.String(63), nullable=False),
        sa.Column("queued", _BIG, nullable=True),
        sa.Column("jobs", _BIG, nullable=True),
        sa.Column("ranks", _BIG, nullable=True),
        sa.Column("gpus", _BIG, nullable=True),
        sa.Column("updated_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("owner", name="pk_quotas"),
    )
    op.create_table(
        "slot_host",
        sa.Column("id", _BIG, autoincrement=False, nullable=False),
        sa.Column("host", sa.String(255), nullable=False),
        sa.Column("expires_at", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_slot_host"),
    )
    op.create_table(
        "attempts",
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("number", _BIG, autoincrement=False, nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("outcome", sa.String(16), nullable=True),
        sa.Column("cause", sa.String(32), nullable=True),
        sa.Column("rank", _BIG, nullable=True),
        sa.Column("exit_code", _BIG, nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("base_step", _BIG, nullable=True),
        sa.Column("base_attempt", _BIG, nullable=True),
        sa.Column("base_digest", sa.String(64), nullable=True),
        sa.Column("last_step", _BIG, nullable=False),
        sa.Column("committed_step", _BIG, nullable=True),
        sa.Column("steps_lost", _BIG, nullable=True),
        sa.Column("resume_report", _JSON, nullable=True),
        sa.Column("redone", _JSON, nullable=True),
        sa.Column("metrics_differ", _JSON, nullable=True),
        sa.Column("report_token_hash", sa.String(64), nullable=False),
        sa.Column("launch", _JSON, nullable=False),
        sa.Column("results", _JSON, nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("begun_at", _TIME, nullable=True),
        sa.Column("deadlines", _JSON, nullable=True),
        sa.Column("training_at", _TIME, nullable=True),
        sa.Column("stop_at", _TIME, nullable=True),
        sa.Column("end_began_at", _TIME, nullable=True),
        sa.Column("ended_at", _TIME, nullable=True),
        sa.Column("pace", _JSON, nullable=True),
        sa.Column("notes_reported", _BIG, server_default="0", nullable=False),
        sa.Column("metric_values_refused", _BIG, server_default="0", nullable=False),
        sa.Column("late_requests", _BIG, server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_attempts_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "number", name="pk_attempts"),
    )
    op.create_index("ix_attempts_phase", "attempts", ["phase"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("step", _BIG, autoincrement=False, nullable=False),
        sa.Column("attempt", _BIG, autoincrement=False, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("parent", _JSON, nullable=True),
        sa.Column("size", _BIG, nullable=False),
        sa.Column("files", _BIG, nullable=False),
        sa.Column("seconds", _REAL, nullable=True),
        sa.Column("stall", _REAL, nullable=True),
        sa.Column("reason", sa.String(16), nullable=False),
        sa.Column("finished", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("removing_since", _TIME, nullable=True),
        sa.Column("adopted", sa.Boolean(), nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("verified_at", _TIME, nullable=True),
        sa.Column("verification", sa.String(16), nullable=True),
        sa.Column("verification_error", sa.Text(), nullable=True),
        sa.Column("hook_iteration", _BIG, nullable=True),
        sa.Column("uri", sa.String(2000), nullable=True),
        sa.Column("uploaded_at", _TIME, nullable=True),
        sa.Column("created_at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_checkpoints_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "step", "attempt", name="pk_checkpoints"),
    )
    op.create_index(
        "ix_checkpoints_removing_since",
        "checkpoints",
        ["removing_since"],
        unique=False,
        sqlite_where=sa.text("removing_since IS NOT NULL"),
        postgresql_where=sa.text("removing_since IS NOT NULL"),
    )
    op.create_table(
        "events",
        sa.Column("id", _BIG.with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.Column("type", sa.String(64), nullable=False),
        sa.Column("attempt", _BIG, nullable=True),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", _JSON, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_events_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_events_job_id_id", "events", ["job_id", "id"], unique=False)
    op.create_table(
        "hook_samples",
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("rank", _BIG, autoincrement=False, nullable=False),
        sa.Column("step", _BIG, autoincrement=False, nullable=False),
        sa.Column("attempt", _BIG, nullable=False),
        sa.Column("summary", _JSON, nullable=False),
        sa.Column("at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_hook_samples_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "rank", "step", name="pk_hook_samples"),
    )
    op.create_table(
        "job_labels",
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("key", sa.String(63), nullable=False),
        sa.Column("value", sa.String(255), nullable=False),
        sa.Column("created_at", _TIME, server_default=sa.func.now(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_job_labels_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "key", name="pk_job_labels"),
    )
    op.create_index(
        "ix_job_labels_key_value_created_at", "job_labels", ["key", "value", "created_at", "job_id"], unique=False
    )
    op.create_table(
        "metric_series",
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("stride", _BIG, nullable=False),
        sa.Column("phase", _BIG, nullable=False),
        sa.Column("points", _BIG, nullable=False),
        sa.Column("top", _BIG, nullable=False),
        sa.Column("newest", _BIG, nullable=False),
        sa.Column("attempt", _BIG, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_metric_series_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "name", name="pk_metric_series"),
    )
    op.create_table(
        "metrics",
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("step", _BIG, autoincrement=False, nullable=False),
        sa.Column("attempt", _BIG, nullable=False),
        sa.Column("value", _REAL, nullable=True),
        sa.Column("at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_metrics_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "name", "step", name="pk_metrics"),
    )
    op.create_table(
        "superseded_metrics",
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("step", _BIG, autoincrement=False, nullable=False),
        sa.Column("attempt", _BIG, autoincrement=False, nullable=False),
        sa.Column("value", _REAL, nullable=True),
        sa.Column("at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_superseded_metrics_job_id_jobs", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "name", "step", "attempt", name="pk_superseded_metrics"),
    )
    op.create_table(
        "attempt_nodes",
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("attempt", _BIG, autoincrement=False, nullable=False),
        sa.Column("node", _BIG, autoincrement=False, nullable=False),
        sa.Column("host", sa.String(255), nullable=True),
        sa.Column("pid", _BIG, nullable=True),
        sa.Column("start_time", _BIG, nullable=True),
        sa.Column("gpus", _JSON, nullable=False),
        sa.Column("cpu_slots", _JSON, nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.Column("acked", _JSON, nullable=False),
        sa.Column("reported_at", _TIME, nullable=True),
        sa.Column("address", sa.String(255), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id", "attempt"],
            ["attempts.job_id", "attempts.number"],
            name="fk_attempt_nodes_job_id_attempt_attempts",
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job_id", "attempt", "node", name="pk_attempt_nodes"),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.execute(_ADD_ONLY)
        op.execute(
            "CREATE TRIGGER events_add_only BEFORE UPDATE OR DELETE ON events "
            "FOR EACH ROW EXECUTE FUNCTION ratchet_events_add_only()"
        )
        return
    op.execute(
        f"CREATE TRIGGER events_not_updated BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END"
    )
    op.execute(
        "CREATE TRIGGER events_not_deleted BEFORE DELETE ON events WHEN EXISTS (SELECT 1 FROM jobs WHERE id = OLD.job_id) "
        f"BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END"
    )


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP TRIGGER events_add_only ON events")
        op.execute("DROP FUNCTION ratchet_events_add_only()")
    for table in (
        "attempt_nodes",
        "superseded_metrics",
        "metrics",
        "metric_series",
        "job_labels",
        "hook_samples",
        "events",
        "checkpoints",
        "attempts",
        "slot_host",
        "quotas",
        "jobs",
        "idempotency_keys",
        "clock_levels",
        "api_tokens",
    ):
        op.drop_table(table)
