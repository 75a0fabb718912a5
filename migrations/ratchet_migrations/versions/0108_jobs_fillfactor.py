"""Room in the pages of the table of jobs, so that a new version of a row is in the old one's page and no index changes.
Pages that exist already get the room when they are rewritten (VACUUM FULL)."""

from __future__ import annotations

from alembic import op

revision = "0108"
down_revision = "0107"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE jobs SET (fillfactor = 50)")


def downgrade() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE jobs RESET (fillfactor)")
