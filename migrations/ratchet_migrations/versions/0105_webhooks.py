"""Webhooks and their deliveries."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0105"
down_revision = "0104"
branch_labels = None
depends_on = None

_BIG, _JSON, _TIME = sa.BigInteger(), sa.JSON(), sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(16), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("types", _JSON, nullable=False),
        sa.Column("owner", sa.String(63), nullable=True),
        sa.Column("label", sa.String(320), nullable=True),
        sa.Column("format", sa.String(16), nullable=False),
        sa.Column("secret", sa.String(64), nullable=True),
        sa.Column("old_secret", sa.String(64), nullable=True),
        sa.Column("old_secret_until", _TIME, nullable=True),
        sa.Column("cursor", _BIG, nullable=False),
        sa.Column("failures", _BIG, nullable=False),
        sa.Column("accepted_at", _TIME, nullable=True),
        sa.Column("new_after", _TIME, nullable=True),
        sa.Column("disabled_at", _TIME, nullable=True),
        sa.Column("disabled_reason", sa.Text(), nullable=True),
        sa.Column("created_at", _TIME, nullable=False),
        sa.Column("created_by", sa.String(63), nullable=False),
        sa.Column("lease_owner", sa.String(128), nullable=True),
        sa.Column("lease_token", sa.String(64), nullable=True),
        sa.Column("lease_expires_at", _TIME, nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
    )
    op.create_table(
        "webhook_deliveries",
        sa.Column("webhook_id", sa.String(16), nullable=False),
        sa.Column("event_id", _BIG, nullable=False),
        sa.Column("job_id", sa.String(16), nullable=False),
        sa.Column("type", sa.String(80), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("tries", _BIG, nullable=False),
        sa.Column("answer", _BIG, nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("first_try", _TIME, nullable=True),
        sa.Column("next_try", _TIME, nullable=True),
        sa.Column("at", _TIME, nullable=False),
        sa.ForeignKeyConstraint(
            ["webhook_id"], ["webhooks.id"], name="fk_webhook_deliveries_webhook_id_webhooks", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("webhook_id", "event_id", name="pk_webhook_deliveries"),
    )
    op.create_index(
        "ix_webhook_deliveries_webhook_id_status_job_id", "webhook_deliveries", ["webhook_id", "status", "job_id"]
    )


def downgrade() -> None:
    op.drop_table("webhook_deliveries")
    op.drop_table("webhooks")
