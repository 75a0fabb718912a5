"""The audit log: rows are only ever added."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0104"
down_revision = "0103"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger()
_REFUSED = "rows of the audit log are only ever added"
_ADD_ONLY = f"""
CREATE FUNCTION ratchet_audit_add_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '{_REFUSED}';
END
$$
"""


def upgrade() -> None:
    op.create_table(
        "audit",
        sa.Column("id", _BIG.with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(63), nullable=True),
        sa.Column("role", sa.String(16), nullable=True),
        sa.Column("token", sa.String(16), nullable=True),
        sa.Column("token_name", sa.String(63), nullable=True),
        sa.Column("action", sa.String(32), nullable=False),
        sa.Column("subject_kind", sa.String(16), nullable=False),
        sa.Column("subject", sa.String(64), nullable=False),
        sa.Column("owner", sa.String(63), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_audit_at_id", "audit", ["at", "id"])
    for column in ("actor", "owner", "subject"):
        op.create_index(f"ix_audit_{column}_at_id", "audit", [column, "at", "id"])
    if op.get_bind().dialect.name == "postgresql":
        op.execute(_ADD_ONLY)
        op.execute(
            "CREATE TRIGGER audit_add_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit "
            "FOR EACH STATEMENT EXECUTE FUNCTION ratchet_audit_add_only()"
        )
        return
    for name, event in (
        ("updated", "UPDATE ON audit"),
        ("deleted", "DELETE ON audit"),
        # INSERT OR REPLACE deletes the old row without the trigger of DELETE
        ("replaced", "INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id)"),
    ):
        op.execute(f"CREATE TRIGGER audit_not_{name} BEFORE {event} BEGIN SELECT RAISE(ABORT, '{_REFUSED}'); END")


def downgrade() -> None:
    op.drop_table("audit")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION ratchet_audit_add_only()")
