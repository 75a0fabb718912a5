"""Detects jumps of wall clocks by comparison with the monotonic clock. One row per clock and boot (``models.ClockLevel``) stores
the difference of the two clocks. So one process handles a jump for all processes of the machine. A jump that happened while no
process ran is found by the next process of the same boot."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.orm import Session

from ratchet_service.db.clock import Clock, now_in
from ratchet_service.db.models import ClockLevel, Event
from ratchet_service.lifecycle import monotonic_deadlines

MACHINE: Final = "machine"
"""This machine's clock; the retry times of jobs go by it."""
DATABASE: Final = "database"
"""The database server's clock, which with SQLite is this machine's; jobs are deleted at their ttl by it."""
_FORGOTTEN: Final = timedelta(days=30)
"""Boots whose rows have not been written for this long are over, or start again as unknown ones."""
_PLAUSIBLE_SECONDS: Final = 60.0
"""Seconds. A clock this near to the time of the newest event is assumed not to have jumped since."""


class Seen(NamedTuple):
    """Result of ``Jumps.handle``. ``jump_seconds``: seconds of a new jump, positive if forwards; 0.0: there is none.
    ``first_observation``: nothing earlier is known, so that a jump cannot be excluded."""

    row: ClockLevel
    jump_seconds: float
    first_observation: bool


class Jumps:
    """Detects jumps of one clock, which ``wall`` reads. ``name``: the clock's key in the table."""

    def __init__(self, clock: Clock, name: str, wall: Callable[[], datetime]) -> None:
        self._clock, self._name, self._wall = clock, name, wall
        self._level: float | None = None
        self._paused_until = 0.0

    @property
    def is_paused(self) -> bool:
        """True during a pause that ``handle`` has stored. In a pause, the caller may do nothing that depends on this clock's
        time."""
        return self._clock.monotonic() < self._paused_until

    def observed_jump(self) -> float | None:
        """Return the seconds by which the clock has jumped since this process last used its row; None: not used yet."""
        return None if self._level is None else monotonic_deadlines.jump_seconds(self._wall_offset(), self._level)

    def load(self, session: Session) -> bool:
        """Take over the level and the pause from the clock's row, and return True. Return False, without an effect, if there is
        no row or the clock has jumped since. In that case call ``handle``."""
        row = session.get(ClockLevel, (self._clock.boot_id(), self._name))
        if row is None or monotonic_deadlines.jump_seconds(self._wall_offset(), row.level) != 0.0:
            return False
        self._level, self._paused_until = row.level, row.rests_until or 0.0
        return True

    def handle(self, session: Session, pause_seconds: Callable[[bool], float] = lambda _: 0.0) -> Seen:
        """Detect a jump. Store the clock's new level, and a pause if necessary, in the caller's write transaction. The caller
        must do what follows from the jump in the same transaction, since no other process of this machine does it. After the
        commit, the caller must call ``mark_handled``. ``pause_seconds``: returns for how long nothing may be done that depends on
        the clock; its argument is True if no earlier level is known."""
        boot, level, now = self._clock.boot_id(), self._wall_offset(), now_in(session)
        key, old = (boot, self._name), ClockLevel.seen_at < now - _FORGOTTEN
        session.execute(sa.delete(ClockLevel).where(ClockLevel.boot != boot, old))
        row = session.get(ClockLevel, key, with_for_update=True)
        unknown = row is None and self._level is None
        if row is None:  # a long-running process still knows its level, even if the row has been deleted
            before = level if self._level is None else self._level
            insert = sqlite.insert if session.get_bind().dialect.name == "sqlite" else postgresql.insert
            made = insert(ClockLevel).values(boot=boot, clock=self._name, level=before, seen_at=now)
            session.execute(made.on_conflict_do_nothing())
            row = session.get_one(ClockLevel, key, with_for_update=True)
        fresh = monotonic_deadlines.jump_seconds(level, row.level)
        if fresh != 0.0:
            row.level, row.seen_at = level, now
        seconds = pause_seconds(unknown) if unknown or fresh != 0.0 else 0.0
        if seconds > 0.0:
            row.rests_until = self._clock.monotonic() + seconds
        return Seen(row, fresh, unknown)

    def mark_handled(self, seen: Seen) -> None:
        """Use the level and the pause of ``seen`` from now on, after the transaction of ``handle`` was committed."""
        self._level, self._paused_until = seen.row.level, seen.row.rests_until or 0.0

    def _wall_offset(self) -> float:
        """Return by how many seconds the clock is ahead of the monotonic one now."""
        return monotonic_deadlines.wall_offset(self._clock, self._wall)


def is_plausible(session: Session, now: datetime) -> bool:
    """True if ``now`` is at most a minute from the newest event in the database, or there is no event."""
    newest = session.scalar(sa.select(Event.at).order_by(Event.id.desc()).limit(1))
    return newest is None or abs((now - newest).total_seconds()) <= _PLAUSIBLE_SECONDS
