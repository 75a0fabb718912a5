"""Clocks that are set, as all processes of one machine know of them: by a row for each (``models.ClockLevel``).

A wall clock stands some seconds ahead of the monotonic one, and that changes only when it is set. The row keeps that level for as
long as the machine is not started anew: so a process that starts right behind a jump knows of it, also where nobody was there
when it came, and of several processes that see one jump the first has seen to it for all.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from ratchet_service import steady
from ratchet_service.clock import Clock, now_in
from ratchet_service.models import ClockLevel, Event

MACHINE: Final = "machine"
"""This machine's clock: times at which jobs are tried again go by it."""
DATABASE: Final = "database"
"""The database server's, which with SQLite is this machine's: jobs are deleted at their ttl by it."""
_FORGOTTEN: Final = timedelta(days=30)
"""Machines' starts that nobody has written of for so long are over, or begin anew as one that is not known."""
_NEW: Final = 60.0
"""Seconds. A clock that is so near to the newest thing recorded has not jumped since by more."""


class Seen(NamedTuple):
    """``fresh``: by how many seconds the clock has jumped since the row was written, forwards if positive; 0.0: there is nothing
    to see to. ``unknown``: there was no row of this start of the machine, so nobody can tell."""

    row: ClockLevel
    fresh: float
    unknown: bool


class Jumps:
    """One clock. ``wall`` reads it."""

    def __init__(self, clock: Clock, name: str, wall: Callable[[], datetime]) -> None:
        self._clock, self._name, self._wall = clock, name, wall
        self._level: float | None = None
        self._rests_until = 0.0

    @property
    def rests(self) -> bool:
        return self._clock.monotonic() < self._rests_until

    def look(self) -> float | None:
        """By how many seconds the clock has jumped, as this process has seen it; None: it has not read the row yet."""
        return None if self._level is None else steady.jumped(self._now(), self._level)

    def learn(self, session: Session) -> bool:
        """At a process's start, for reading alone. False: there is something to ``settle``."""
        row = session.get(ClockLevel, (self._clock.boot(), self._name))
        if row is None or steady.jumped(self._now(), row.level) != 0.0:
            return False
        self._level, self._rests_until = row.level, row.rests_until or 0.0
        return True

    def settle(self, session: Session, rests: Callable[[bool], float] = lambda _: 0.0) -> Seen:
        """In a transaction that writes, with the row held: what has to be done for ``fresh`` belongs into it. ``rests``: for how
        many seconds nothing is to go by a clock that has jumped, or (True) that nobody knows; 0.0: it may be believed. Then
        ``settled``, once that is committed."""
        boot, level, now = self._clock.boot(), self._now(), now_in(session)
        key, old = (boot, self._name), ClockLevel.seen_at < now - _FORGOTTEN
        session.execute(sa.delete(ClockLevel).where(ClockLevel.boot != boot, old))
        row = session.get(ClockLevel, key, with_for_update=True)
        unknown = row is None and self._level is None
        if row is None:  # a process that has gone on for long still knows what its row said, though that was forgotten
            before = level if self._level is None else self._level
            insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
            made = insert(ClockLevel).values(boot=boot, clock=self._name, level=before, seen_at=now)
            session.execute(made.on_conflict_do_nothing())
            row = session.get_one(ClockLevel, key, with_for_update=True)
        fresh = steady.jumped(level, row.level)
        if fresh != 0.0:
            row.level, row.seen_at = level, now
        seconds = rests(unknown) if unknown or fresh != 0.0 else 0.0
        if seconds > 0.0:
            row.rests_until = self._clock.monotonic() + seconds
        return Seen(row, fresh, unknown)

    def settled(self, seen: Seen) -> None:
        self._level, self._rests_until = seen.row.level, seen.row.rests_until or 0.0

    def _now(self) -> float:
        return steady.between(self._clock, self._wall)


def plausible(session: Session, now: datetime) -> bool:
    """Whether a clock that nobody knew before can be believed: it shows about the time of the newest thing recorded, or nothing
    is recorded. Else it has jumped, or there was a long pause: nobody can tell."""
    newest = session.scalar(sa.select(Event.at).order_by(Event.id.desc()).limit(1))
    return newest is None or abs((now - newest).total_seconds()) <= _NEW
