"""Migrates the schema at start, one process at a time. On PostgreSQL, a change to a table that waits for its lock makes later
transactions on that table wait. So a migration waits only a few seconds for a lock, then releases its locks and tries again."""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from collections.abc import Callable, Iterator
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
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from ratchet_contract.errors import Refused
from ratchet_service.db.engine import Database, first_line

log = logging.getLogger(__name__)

LOCK_SECONDS: Final = 5.0
"""How long a migration waits for a lock; others may wait behind it just as long."""
MAX_TRIES: Final = 24
PAUSE_SECONDS: Final = 2.0
"""Seconds between two tries, in which the others can proceed."""
_POLL_SECONDS: Final = 0.5
_RETRYABLE_SQLSTATES: Final = ("55P03", "40P01")
"""lock_not_available; deadlock_detected: the other transaction holds the next table and waits for one changed already."""
_BLOCKING_QUERY: Final = sa.text(
    "SELECT pid, usename, application_name, state, extract(epoch FROM clock_timestamp() - xact_start) AS seconds "
    "FROM pg_stat_activity WHERE pid = ANY(pg_blocking_pids(:pid)) ORDER BY pid"
)


class MigrationBlocked(Refused):
    """In each of its tries, a migration could not get a lock because of other transactions."""

    code = "migration-blocked"


class Blocking:
    """The database processes that were last seen to block a connection: their server pids, and a description for messages."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.pids: tuple[int, ...] = ()
        self.description = "a connection that has since ended"

    @contextmanager
    def watch(self, connection: Connection) -> Iterator[None]:
        """Context manager: in its block, a thread reads which processes block ``connection``. Limits each wait of the connection
        for a lock until its transaction ends. PostgreSQL only."""
        connection.execute(sa.text(f"SET LOCAL lock_timeout = {int(LOCK_SECONDS * 1000)}"))
        pid, over = connection.scalar(sa.text("SELECT pg_backend_pid()")), threading.Event()

        def poll_until_over() -> None:
            """Poll until the block has ended; stop after an error of the database."""
            while not over.wait(_POLL_SECONDS):
                try:
                    self._poll(pid)
                except SQLAlchemyError as error:
                    log.info("the connection that blocks the migration is unknown: %s", first_line(error))
                    return

        thread = threading.Thread(target=poll_until_over, name="migration-locks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _poll(self, pid: int) -> None:
        """Store the processes that block the connection with this server pid. If none does, the earlier ones are kept."""
        with self._database.read() as session:
            rows = session.execute(_BLOCKING_QUERY, {"pid": pid}).all()
        if rows:
            self.pids = tuple(row.pid for row in rows)
            self.description = ", ".join(
                f"pid {row.pid} (user {row.usename}, {row.application_name or 'no application name'}, {row.state}"
                + (f", its transaction for {row.seconds:.0f} s" if row.seconds is not None else "")
                + ")"
                for row in rows
            )


def run_with_retries(database: Database, migrate: Callable[[Blocking], None]) -> None:
    """Run ``migrate``, which must use one transaction, in at most ``MAX_TRIES`` tries. It is run again only if PostgreSQL ends it
    because it has waited too long for a lock, or because of a deadlock. Raises ``MigrationBlocked`` if the last try ends so."""
    for n in range(1, MAX_TRIES + 1):
        blocking = Blocking(database)
        try:
            migrate(blocking)
            return
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) not in _RETRYABLE_SQLSTATES:
                raise
        cure = "".join(f" SELECT pg_terminate_backend({pid});" for pid in blocking.pids) or " see pg_stat_activity"
        text = f"the migration waits for a table that {blocking.description} holds; end that transaction, or:{cure}"
        if n == MAX_TRIES:
            raise MigrationBlocked(
                f"{text}. Nothing was changed: start the service again once it has ended (tried {MAX_TRIES} times)"
            )
        log.warning("%s. Nothing is changed yet, and no lock is held meanwhile: try %d of %d", text, n + 1, MAX_TRIES)
        pause()


def pause() -> None:
    """Wait ``PAUSE_SECONDS``, so that other transactions can proceed."""
    time.sleep(PAUSE_SECONDS)


ADVISORY_LOCK: Final = 0x52_41_54_43_48_45_54  # "RATCHET" in ASCII


_REVISION: Final = sa.text("SELECT version_num FROM alembic_version")


_DEVELOPMENT: Final = frozenset(f"{number:04d}" for number in range(1, 15))
"""Revisions of development versions, which were never released."""


class NewerSchema(Refused):
    """The database's revision is unknown to this version: a newer version of Ratchet has probably created or migrated it."""

    code = "schema-newer"


class UnsupportedSchema(Refused):
    """A development version created the database: it cannot be migrated."""

    code = "schema-unsupported"


def script_config() -> Config:
    """Return Alembic's settings. The migration scripts are in the package ``ratchet_migrations``; there is no ini file."""
    spec = find_spec("ratchet_migrations")
    assert spec is not None and spec.submodule_search_locations
    settings = Config()
    settings.set_main_option("script_location", next(iter(spec.submodule_search_locations)).replace("%", "%%"))
    settings.set_main_option("path_separator", "os")
    return settings


def config(connection: Connection) -> Config:
    """Return the settings of ``script_config``, with ``connection`` as the connection to migrate on."""
    settings = script_config()
    settings.attributes["connection"] = connection
    return settings


@cache
def head_revision() -> str:
    """Return the newest revision of the schema that this version knows, which is the one it works with."""
    return str(ScriptDirectory.from_config(script_config()).get_current_head())


@cache
def known_revisions() -> frozenset[str]:
    """Return all revisions for which this version has migrations."""
    return frozenset(script.revision for script in ScriptDirectory.from_config(script_config()).walk_revisions())


def refusal(revision: str) -> NewerSchema | UnsupportedSchema | None:
    """Return the error with which this version refuses a database of this revision; None if it can use or migrate it."""
    if revision in known_revisions():
        return None
    if revision in _DEVELOPMENT:
        return UnsupportedSchema(
            f"the database was made by a development version of Ratchet (revision {revision}); it cannot be migrated. "
            "Suspend the jobs and export their models with the version that made it, then start this version with an empty "
            "run directory and database. `start_from` starts a new job from an exported model; hook state and data position "
            "are not carried over"
        )
    return NewerSchema(
        f"the database was made by a newer version of Ratchet (revision {revision}, this one knows up to "
        f"{head_revision()}): start that "
        "version, or restore a backup"
    )


def revision_of(connection: Connection) -> str | None:
    """Return the revision that the database records; None if it records none."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    found = connection.scalar(_REVISION)
    return None if found is None else str(found)


def check_revision(database: Database) -> None:
    """Raise ``NewerSchema`` or ``UnsupportedSchema`` if this version cannot use or migrate the database. With SQLite this creates
    a missing file."""
    with database.engine.connect() as connection:
        _raise_if_unusable(connection)


def _raise_if_unusable(connection: Connection) -> None:
    """Raise ``NewerSchema`` or ``UnsupportedSchema`` if this version cannot use or migrate the database. One without a schema is
    accepted."""
    revision = revision_of(connection)
    refused = None if revision is None else refusal(revision)
    if refused is not None:
        raise refused


def upgrade(database: Database, revision: str = "head") -> None:
    """Run the missing migrations up to ``revision``. Blocks while another process migrates. Raises ``NewerSchema``,
    ``UnsupportedSchema`` and ``MigrationBlocked``."""

    def migrate(blocking: Blocking) -> None:
        with _migration_lock(database, blocking) as connection:
            _raise_if_unusable(connection)
            command.upgrade(config(connection), revision)

    run_with_retries(database, migrate)


def downgrade(database: Database, revision: str) -> None:
    """Migrate back to ``revision``, in one transaction. Raises ``MigrationBlocked``."""

    def migrate(blocking: Blocking) -> None:
        with _migration_lock(database, blocking) as connection:
            command.downgrade(config(connection), revision)

    run_with_retries(database, migrate)


@contextmanager
def _migration_lock(database: Database, blocking: Blocking) -> Iterator[Connection]:
    """Yield a connection in the migration's transaction. Blocks without a limit while another process migrates."""
    if not database.is_sqlite:
        # The lock belongs to the transaction, so it works behind a pooler too and is released if the process dies.
        with database.engine.begin() as connection:
            connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
            connection.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = 0"))
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(ADVISORY_LOCK)))
            with blocking.watch(connection):  # only now: the wait for another migrating process is unlimited
                yield connection
        return
    assert database.url.database is not None
    path = Path(database.url.database)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(path.name + ".migrate.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with database.engine.begin() as connection:
            yield connection
