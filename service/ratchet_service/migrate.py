"""Bring the schema up to date at start, one process at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from sqlalchemy.engine import Connection

from ratchet_service.database import Database

ADVISORY_LOCK: Final = 0x52_41_54_43_48_45_54  # "RATCHET" in ASCII


def scripts() -> Config:
    """Alembic's settings without an ini file; the scripts lie in the package ``ratchet_migrations``."""
    spec = find_spec("ratchet_migrations")
    assert spec is not None and spec.submodule_search_locations
    settings = Config()
    settings.set_main_option("script_location", next(iter(spec.submodule_search_locations)).replace("%", "%%"))
    settings.set_main_option("path_separator", "os")
    return settings


def config(connection: Connection) -> Config:
    """The same, to run on ``connection``."""
    settings = scripts()
    settings.attributes["connection"] = connection
    return settings


def upgrade(database: Database, revision: str = "head") -> None:
    """Run all migrations up to ``revision``. Two services that start together do it one after the other."""
    with _locked(database) as connection:
        command.upgrade(config(connection), revision)


def downgrade(database: Database, revision: str) -> None:
    with _locked(database) as connection:
        command.downgrade(config(connection), revision)


@contextmanager
def _locked(database: Database) -> Iterator[Connection]:
    """The one transaction of a migration, in which nobody else migrates."""
    if not database.is_sqlite:
        # The lock is the transaction's own, so that it holds behind a pooler, too, and goes with a process that dies.
        with database.engine.begin() as connection:
            connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
            connection.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(ADVISORY_LOCK)))
            yield connection
        return
    assert database.url.database is not None
    path = Path(database.url.database)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".migrate.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with database.engine.begin() as connection:
            yield connection
