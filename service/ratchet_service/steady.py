"""Time that no clock's step lengthens: what a reconciler's deadlines go by.

Stored times are wall-clock times, of whichever machine wrote them, and wall clocks are set: by NTP, by hand, when a virtual
machine is resumed. So a deadline is counted by monotonic clocks alone. What has been counted is kept in the attempt's row as a
``Count`` (``marks``), and the next process counts on from there: a monotonic clock goes on from process to process, for as long
as the machine is not started anew. Of a deadline no time is counted in which nobody may have looked: it is late, never early,
and never begins from 0 again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
            found = Count(float(stored["seconds"]), str(stored["boot"]), float(stored["monotonic"]))
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        return found if 0.0 <= found.seconds < math.inf and math.isfinite(found.monotonic) else None


def counted(stored: Any, begun_at: datetime | None, clock: Clock) -> float | None:
    """Seconds that an attempt has run by now; None: no agent of it has begun. ``stored``: its ``Count``.

    While nobody was there on this start of the machine, the time since the last count is not known and not counted. Of an
    attempt without a count (the version before made it) the wall clock is believed."""
    if begun_at is None:
        return None
    found = carried(stored, clock, math.inf)
    return max(0.0, (clock.now() - begun_at).total_seconds()) if found is None else found


def carried(stored: Any, clock: Clock, most: float) -> float | None:
    """Seconds that reconcilers before this one had counted of a deadline (``stored``: its ``Count``); None: nothing that can be
    read. Of the time since then no more than ``most`` is counted, for as long counts are kept up while somebody looks: behind
    that perhaps nobody did, and nobody answered the agents either."""
    count = Count.read(stored)
    if count is None:
        return None
    since = clock.monotonic() - count.monotonic if count.boot == clock.boot() else 0.0
    return count.seconds + min(max(0.0, since), most)


def between(clock: Clock, wall: Callable[[], datetime]) -> float:
    """``wall`` minus monotonic, seconds. This process may be stopped between two readings: then both are read again."""
    for _ in range(_LOOKS):
        before = clock.monotonic()
        shown = wall().timestamp()
        after = clock.monotonic()
        if after - before < _NEAR:
            break
    return shown - after


def jumped(level: float, before: float) -> float:
    """By how many seconds a wall clock has jumped, forwards if positive, that stood ``before`` and now stands ``level`` ahead of
    the monotonic one; 0.0: it has not, or has drifted by no more than ``TOLERANCE``."""
    return level - before if abs(level - before) > TOLERANCE else 0.0
