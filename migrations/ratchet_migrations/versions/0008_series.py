"""Series that stay small, notes that are counted, and a history that is only ever added to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger()
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
        "metric_series",
        sa.Column("job_id", sa.String(16), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("name", sa.String(200), primary_key=True),
        *(sa.Column(c, _BIG, nullable=False) for c in ("stride", "phase", "points", "top", "newest", "epoch")),
    )
    # Of what is there every point was kept; a series that is too long is thinned when it grows.
    op.execute(
        "INSERT INTO metric_series (job_id, name, stride, phase, points, top, newest, epoch) "
        "SELECT job_id, name, 1, 0, count(*), max(step), max(step), max(epoch) FROM metrics GROUP BY job_id, name"
    )
    op.add_column("attempts", sa.Column("notes", _BIG, nullable=False, server_default="0"))
    op.add_column("attempts", sa.Column("values_refused", _BIG, nullable=False, server_default="0"))
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
    else:
        op.execute("DROP TRIGGER events_not_updated")
        op.execute("DROP TRIGGER events_not_deleted")
    op.drop_column("attempts", "values_refused")
    op.drop_column("attempts", "notes")
    op.drop_table("metric_series")
