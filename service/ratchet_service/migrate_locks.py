"""Whom a migration waits for on PostgreSQL: a change of a table waits for all who read it, and all who come later wait for it.

So it waits for a few seconds only, lets the others go on, and tries again; whoever stands in the way is named.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from ratchet_contract.errors import Refused
from ratchet_service.database import Database, first_line

log = logging.getLogger(__name__)

LOCK_SECONDS: Final = 5.0
"""Everybody else may wait for so long behind a migration that waits."""
TRIES: Final = 24
PAUSE: Final = 2.0
"""Seconds between two, in which the others get on."""
_LOOK: Final = 0.5
_NOT_NOW: Final = ("55P03", "40P01")
"""lock_not_available; deadlock_detected: the other one holds what is changed next, and wants what has been changed."""
_BLOCKING: Final = sa.text(
    "SELECT pid, usename, application_name, state, extract(epoch FROM clock_timestamp() - xact_start) AS seconds "
    "FROM pg_stat_activity WHERE pid = ANY(pg_blocking_pids(:pid)) ORDER BY pid"
)


class MigrationBlocked(Refused):
    """A transaction of somebody else holds a table that a migration must change."""

    code = "migration-blocked"


class Blocking:
    """Who is in the way of a connection, looked at from another one while it waits."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.pids: tuple[int, ...] = ()
        self.told = "somebody who is gone by now"

    @contextmanager
    def watching(self, connection: Connection) -> Iterator[None]:
        """``connection`` waits for a lock for at most ``LOCK_SECONDS`` from here on, until its transaction ends."""
        connection.execute(sa.text(f"SET LOCAL lock_timeout = {int(LOCK_SECONDS * 1000)}"))
        pid, over = connection.scalar(sa.text("SELECT pg_backend_pid()")), threading.Event()

        def look() -> None:
            while not over.wait(_LOOK):
                try:
                    self._look(pid)
                except SQLAlchemyError as error:
                    log.info("who blocks the migration is not known: %s", first_line(error))
                    return

        thread = threading.Thread(target=look, name="migration-locks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _look(self, pid: int) -> None:
        with self._database.read() as session:
            rows = session.execute(_BLOCKING, {"pid": pid}).all()
        if rows:
            self.pids = tuple(row.pid for row in rows)
            self.told = ", ".join(
                f"pid {row.pid} (user {row.usename}, {row.application_name or 'no application name'}, {row.state}"
                + (f", its transaction for {row.seconds:.0f} s" if row.seconds is not None else "")
                + ")"
                for row in rows
            )


def tried(database: Database, migrate: Callable[[Blocking], None]) -> None:
    """Carry ``migrate`` out, which is rolled back as a whole where it does not get a lock. Raises ``MigrationBlocked``, and
    what it raises itself."""
    for n in range(1, TRIES + 1):
        blocking = Blocking(database)
        try:
            migrate(blocking)
            return
        except OperationalError as error:
            if getattr(error.orig, "sqlstate", None) not in _NOT_NOW:
                raise
        cure = "".join(f" SELECT pg_terminate_backend({pid});" for pid in blocking.pids) or " see pg_stat_activity"
        text = f"the migration waits for a table that {blocking.told} holds; end that transaction, or:{cure}"
        if n == TRIES:
            raise MigrationBlocked(
                f"{text}. Nothing was changed: start the service again once it has ended (tried {TRIES} times)"
            )
        log.warning("%s. Nothing is changed yet, and nobody waits for it: try %d of %d", text, n + 1, TRIES)
        pause()


def pause() -> None:
    """The others get on."""
    time.sleep(PAUSE)
