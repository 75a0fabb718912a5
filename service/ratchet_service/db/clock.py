"""The source of the control plane's times: one object, which a simulation replaces. Leases expire by the database server's clock,
which all machines share."""

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
    """Returns the times of this machine's clocks and of the database server's."""

    def now(self) -> datetime:
        """Return the UTC time of this machine."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return the seconds of a clock that nobody can set. It stands still while the machine is suspended."""
        return time.monotonic()

    def boot_id(self) -> str:
        """Return an id of this boot of the machine. All processes with the same id share the clock of ``monotonic``."""
        return _boot_id()

    def server_now(self, session: Session) -> datetime:
        """Return the UTC time of the database server, which is queried; with SQLite, this machine's."""
        if session.get_bind().dialect.name == "sqlite":
            return self.now()
        now = session.scalar(sa.select(sa.func.clock_timestamp()))
        assert isinstance(now, datetime)
        return now


@cache
def _boot_id() -> str:
    """Return an id that processes with the same monotonic clock share; a random one if it cannot be read."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + _time_namespace_offset()
    except OSError:
        return uuid.uuid4().hex


def _time_namespace_offset() -> str:
    """Return, as text, the offset of the monotonic clock in this process's time namespace; empty if there is none."""
    try:
        lines = Path("/proc/self/timens_offsets").read_text().splitlines()
    except OSError:
        return ""
    shifts = [words[1:] for line in lines if (words := line.split())[:1] == ["monotonic"]]
    return "".join(f"+{'.'.join(shift)}" for shift in shifts if set(shift) != {"0"})


def session_info(clock: Clock) -> dict[str, Clock]:
    """Return the ``info`` of a session, by which ``clock_of`` finds ``clock``."""
    return {_KEY: clock}


def clock_of(session: Session) -> Clock:
    """Return the clock of the session's database; a new ``Clock`` of this machine if the session was created without one."""
    found = session.info.get(_KEY)
    return found if isinstance(found, Clock) else Clock()


def now_in(session: Session) -> datetime:
    """Return the UTC time of ``clock_of(session)``, normally this machine's; the server is not queried."""
    return clock_of(session).now()
