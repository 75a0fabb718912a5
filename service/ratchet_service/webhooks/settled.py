"""Up to which id all events are committed. On PostgreSQL a transaction may commit an event with a smaller id after one with a
larger id was read; a reader that remembers the largest id that it saw would skip the smaller.

An INSERT takes the lock ROW EXCLUSIVE on the table before its row gets an id, and keeps it until its transaction has ended and
its rows are visible. So: read the largest visible id, then list the transactions that hold this lock. Every smaller id that is
not visible yet belongs to one of them. Once all of these have ended, each event up to that id is visible, or never will be.
Writers are not slowed down; an event is seen later by at most the time that a transaction takes. SQLite has one writer at a
time, and needs none of this."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_service.db.engine import Database
from ratchet_service.db.models import Event

_WRITERS = sa.text(
    "SELECT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND relation = CAST('events' AS regclass)"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    " AND mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock')"
)


class SettledEvents:
    """Finds the largest id up to which all events of a database are visible; used by one thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._settled = self._candidate = 0
        self._writers: set[str] = set()  # that may still commit an id up to the candidate

    def newest(self) -> int:
        """Return that id; 0 if it is not known yet."""
        with self._database.read() as session:
            if self._database.is_sqlite:
                return _largest(session)
            if self._writers & _writers(session):
                return self._settled
            self._settled, self._candidate = self._candidate, _largest(session)
            self._writers = _writers(session)  # after the id was read: see above
            if not self._writers:
                self._settled = self._candidate
            return self._settled


def _largest(session: Session) -> int:
    """Return the largest visible event id, or 0."""
    return session.scalar(sa.select(sa.func.max(Event.id))) or 0


def _writers(session: Session) -> set[str]:
    """Return the transactions that write events now."""
    return set(session.scalars(_WRITERS))
