"""Where the control plane's times come from: one object, given to the ``Database``, so that a simulation can give another.

Whoever has a session asks ``now_in(session)``, whoever has the database ``database.clock``. Leases expire by the server's clock
(``of_server``), which all machines share; how long this process has been away is told by its own monotonic one.
"""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

_KEY: Final = "ratchet_clock"


class Clock:
    """This machine's clocks, and the database server's."""

    def now(self) -> datetime:
        """UTC, by this machine."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Seconds that nobody sets back. They pass while this process is stopped."""
        return time.monotonic()

    def boot(self) -> str:
        """Names the start of the machine that ``monotonic`` counts from: all processes of it share that clock."""
        return _boot()

    def of_server(self, session: Session) -> datetime:
        """UTC, by the database's server; with SQLite this machine's, since all its writers share that."""
        if session.get_bind().dialect.name == "sqlite":
            return self.now()
        now = session.scalar(sa.select(sa.func.clock_timestamp()))
        assert isinstance(now, datetime)
        return now


@cache
def _boot() -> str:
    """Where the system has no such name, this process's own stands for it: its clock is then nobody else's."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + _offset()
    except OSError:
        return uuid.uuid4().hex


def _offset() -> str:
    """Of a container with a time namespace: its monotonic clock is shifted against those of other processes of the machine.
    Empty: it is not."""
    try:
        lines = Path("/proc/self/timens_offsets").read_text().splitlines()
    except OSError:
        return ""
    shifts = [words[1:] for line in lines if (words := line.split())[:1] == ["monotonic"]]
    return "".join(f"+{'.'.join(shift)}" for shift in shifts if set(shift) != {"0"})


def info(clock: Clock) -> dict[str, Clock]:
    """What a session carries so that ``clock_of`` finds ``clock``."""
    return {_KEY: clock}


def clock_of(session: Session) -> Clock:
    """The clock of the database whose session it is; this machine's where the session was made elsewhere."""
    found = session.info.get(_KEY)
    return found if isinstance(found, Clock) else Clock()


def now_in(session: Session) -> datetime:
    """UTC, by the clock of the session's database."""
    return clock_of(session).now()
