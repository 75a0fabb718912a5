"""Who a job belongs to, who may come in, and how much an owner may hold."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_BIG = sa.BigInteger()
_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    # Jobs from before there were owners belong to the one who has the run directory.
    op.add_column("jobs", sa.Column("owner", sa.String(63), nullable=False, server_default="local"))
    op.create_table(
        "api_tokens",
        sa.Column("id", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(63), nullable=False),
        sa.Column("owner", sa.String(63), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("token_hash", sa.String(64), nullable=False),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("created_by", sa.String(63), nullable=False),
        sa.Column("made_with", sa.String(16), nullable=True),
        sa.Column("expires_at", _TIME, nullable=True),
        sa.Column("revoked_at", _TIME, nullable=True),
        sa.Column("last_used_at", _TIME, nullable=True),
        sa.UniqueConstraint("token_hash", name="uq_api_tokens_token_hash"),
    )
    op.create_index("ix_api_tokens_made_with", "api_tokens", ["made_with"])
    op.create_table(
        "quotas",
        sa.Column("owner", sa.String(63), primary_key=True),
        sa.Column("queued", _BIG, nullable=True),
        sa.Column("jobs", _BIG, nullable=True),
        sa.Column("ranks", _BIG, nullable=True),
        sa.Column("gpus", _BIG, nullable=True),
        sa.Column("updated_at", _TIME, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("quotas")
    op.drop_index("ix_api_tokens_made_with", table_name="api_tokens")
    op.drop_table("api_tokens")
    op.drop_column("jobs", "owner")
