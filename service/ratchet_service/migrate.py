"""Bring the schema up to date at start, one process at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy.engine import Connection

from ratchet_contract.errors import Refused
from ratchet_service.database import Database
from ratchet_service.migrate_locks import Blocking, tried

ADVISORY_LOCK: Final = 0x52_41_54_43_48_45_54  # "RATCHET" in ASCII


_REVISION: Final = sa.text("SELECT version_num FROM alembic_version")


class NewerSchema(Refused):
    """The database was made, or brought up to date, by a newer version."""

    code = "schema-newer"


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


@cache
def head() -> str:
    """The revision that this version works with."""
    return str(ScriptDirectory.from_config(scripts()).get_current_head())


@cache
def known() -> frozenset[str]:
    """All revisions that this version has migrations for."""
    return frozenset(script.revision for script in ScriptDirectory.from_config(scripts()).walk_revisions())


def newer(revision: str) -> str | None:
    """What is wrong with a database of this revision, in words; None where this version knows it."""
    if revision in known():
        return None
    return (
        f"the database was made by a newer version of Ratchet (revision {revision}, this one knows up to {head()}): start that "
        "version, or restore a backup"
    )


def revision_of(connection: Connection) -> str | None:
    """None: it has no schema of ours."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    found = connection.scalar(_REVISION)
    return None if found is None else str(found)


def insist_on_known(database: Database) -> None:
    """Raises ``NewerSchema``, and SQLAlchemy's errors."""
    with database.engine.connect() as connection:
        _insist(connection)


def _insist(connection: Connection) -> None:
    revision = revision_of(connection)
    wrong = None if revision is None else newer(revision)
    if wrong is not None:
        raise NewerSchema(wrong)


def upgrade(database: Database, revision: str = "head") -> None:
    """Run all migrations up to ``revision``. Two services that start together do it one after the other. Raises
    ``NewerSchema``, and ``MigrationBlocked``."""

    def migrate(blocking: Blocking) -> None:
        with _locked(database, blocking) as connection:
            _insist(connection)
            command.upgrade(config(connection), revision)

    tried(database, migrate)


def downgrade(database: Database, revision: str) -> None:
    """Back to ``revision``. Raises ``MigrationBlocked``."""

    def migrate(blocking: Blocking) -> None:
        with _locked(database, blocking) as connection:
            command.downgrade(config(connection), revision)

    tried(database, migrate)


@contextmanager
def _locked(database: Database, blocking: Blocking) -> Iterator[Connection]:
    """The one transaction of a migration, in which nobody else migrates."""
    if not database.is_sqlite:
        # The lock is the transaction's own, so that it holds behind a pooler, too, and goes with a process that dies.
        with database.engine.begin() as connection:
            connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
            connection.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(ADVISORY_LOCK)))
            with blocking.watching(connection):  # another process that migrates is waited for as long as it takes
                yield connection
        return
    assert database.url.database is not None
    path = Path(database.url.database)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".migrate.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with database.engine.begin() as connection:
            yield connection
