"""Alembic's entry point: runs on the connection that ``ratchet_service.db.migrate`` passes."""

from __future__ import annotations

from alembic import context

from ratchet_service.db.models import Base


def run() -> None:
    """Run the migrations in one transaction, on the connection in Alembic's configuration."""
    context.configure(
        connection=context.config.attributes["connection"],
        target_metadata=Base.metadata,
        compare_type=True,
        transactional_ddl=True,
        render_as_batch=True,
    )
    with context.begin_transaction():
        context.run_migrations()


run()
