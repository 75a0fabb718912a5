"""Time that no clock's step lengthens: what a reconciler's deadlines go by.

Stored times are wall-clock times, of whichever machine wrote them, and wall clocks are set: by NTP, by hand, when a virtual
machine is resumed. So a deadline is counted by this process's monotonic clock, from the moment at which it first saw what
began: after a restart it may be late, never early. Only what an attempt has run in all (``policy.timeout``) is carried on, as
a ``Count`` in its row: a monotonic clock goes on from process to process, for as long as the machine is not started anew.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, NamedTuple

from ratchet_service.clock import Clock

TOLERANCE: Final = 5.0
"""Seconds by which a wall clock may leave the monotonic one, at once or little by little, before that is called a jump."""
KEEP_SECONDS: Final = 30.0
"""Between two times at which the counts of attempts with a ``policy.timeout`` are written: so much another machine's
reconciler may count too little."""
_LOOKS: Final = 3
_NEAR: Final = 0.5


class Count(NamedTuple):
    """``seconds`` had been counted when the monotonic clock of the machine's start ``boot`` showed ``monotonic``."""

    seconds: float
    boot: str
    monotonic: float

    @staticmethod
    def read(stored: Any) -> Count | None:
        """None: nothing is stored, or it cannot be read."""
        try:
            return Count(float(stored["seconds"]), str(stored["boot"]), float(stored["monotonic"]))
        except (TypeError, KeyError, ValueError):
            return None


def counted(stored: Any, begun_at: datetime | None, clock: Clock) -> float | None:
    """Seconds that an attempt has run by now; None: no agent of it has begun. ``stored``: its row's ``run_clock``.

    While nobody was there on this start of the machine, the time since the last count is not known and not counted. Of an
    attempt without a count (the version before made it) the wall clock is believed."""
    if begun_at is None:
        return None
    count = Count.read(stored)
    if count is None:
        return max(0.0, (clock.now() - begun_at).total_seconds())
    if count.boot != clock.boot():
        return count.seconds
    return count.seconds + max(0.0, clock.monotonic() - count.monotonic)


class Jumps:
    """Tells when the wall clock has left the monotonic one since the start, or since the last jump that was ``seen``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._level = self._between()

    def look(self) -> float:
        """By how many seconds the wall clock has jumped, forwards if positive; 0.0: it has not. Told until it is ``seen``."""
        jump = self._between() - self._level
        return jump if abs(jump) > TOLERANCE else 0.0

    def seen(self, jump: float) -> None:
        """What had to be done for it is done."""
        self._level += jump

    def _between(self) -> float:
        """Wall minus monotonic. This process may be stopped between two readings: then both are read again."""
        for _ in range(_LOOKS):
            before = self._clock.monotonic()
            wall = self._clock.now().timestamp()
            after = self._clock.monotonic()
            if after - before < _NEAR:
                break
        return wall - after
