"""Elapsed time that does not depend on wall clocks, which can be set; the reconciler's deadlines use it.

Stored times are wall-clock times of whichever machine wrote them, and wall clocks are set: by NTP, by hand, when a virtual
machine is resumed. So deadlines are counted by monotonic clocks alone. The count is kept in the attempt's row as a ``Count``
(``persisted_deadlines``), and the next process continues from it: a monotonic clock continues across processes until the machine
reboots. Time in which possibly no reconciler polled the attempt is not counted for a deadline: it may be late, never early.
The launch deadline starts again from 0 after a long time without a poll (``supervision_rules.record_poll``). The run time that
``policy.timeout`` limits is no such deadline: it includes the time without a reconciler, unless the machine reboots or another
machine takes over.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, NamedTuple

from ratchet_service.db.clock import Clock

TOLERANCE: Final = 5.0
"""Seconds by which a wall clock may depart from the monotonic one, at once or gradually, before that counts as a jump."""
KEEP_SECONDS: Final = 30.0
"""Interval at which the counts of attempts with a ``policy.timeout`` are stored. A reconciler on another machine may count this
much too little."""
_MAX_READINGS: Final = 3
_MAX_READING_GAP: Final = 0.5


class Count(NamedTuple):
    """A stored count of elapsed time: ``seconds`` had been counted when the monotonic clock of the boot with the id ``boot``
    showed ``monotonic``."""

    seconds: float
    boot: str
    monotonic: float

    @staticmethod
    def parse(stored: Any) -> Count | None:
        """Parse a stored count; None: nothing is stored, or it cannot be read."""
        try:
            found = Count(float(stored["seconds"]), str(stored["boot"]), float(stored["monotonic"]))
        except (TypeError, KeyError, ValueError, OverflowError):
            return None
        return found if 0.0 <= found.seconds < math.inf and math.isfinite(found.monotonic) else None


def counted_seconds(stored: Any, begun_at: datetime | None, clock: Clock) -> float | None:
    """Return the seconds that an attempt has run by now; None: no agent of it has begun (``begun_at`` is None). ``stored``: its
    ``Count``.

    If the machine has rebooted, or another machine has taken over, the time since the last count is not known and not counted.
    For an attempt without a readable count, the wall clock's time since ``begun_at`` is used.
    """
    if begun_at is None:
        return None
    found = carried_seconds(stored, clock, math.inf)
    return max(0.0, (clock.now() - begun_at).total_seconds()) if found is None else found


def carried_seconds(stored: Any, clock: Clock, max_gap: float) -> float | None:
    """Return the seconds of a deadline that have elapsed: those that earlier reconcilers counted (``stored``: its ``Count``), and
    the time since then, but at most ``max_gap`` of it. None: nothing is stored that can be read. ``max_gap`` is how old a count
    can become while a reconciler polls; after a longer time, perhaps no reconciler polled, and no service answered the agents
    either. If the machine has rebooted since, or another machine stored the count, none of that time is counted."""
    count = Count.parse(stored)
    if count is None:
        return None
    since = clock.monotonic() - count.monotonic if count.boot == clock.boot_id() else 0.0
    return count.seconds + min(max(0.0, since), max_gap)


def wall_offset(clock: Clock, wall: Callable[[], datetime]) -> float:
    """Return by how many seconds the clock ``wall`` is ahead of the monotonic one (seconds since 1970 less monotonic seconds). If
    reading takes half a second or more, because this process was suspended or ``wall`` is slow, both are read again, at most
    three times in all."""
    for _ in range(_MAX_READINGS):
        before = clock.monotonic()
        wall_seconds = wall().timestamp()
        after = clock.monotonic()
        if after - before < _MAX_READING_GAP:
            break
    return wall_seconds - after


def jump_seconds(level: float, before: float) -> float:
    """Return by how many seconds a wall clock has jumped, forwards if positive. ``before``: by how many seconds it was ahead of
    the monotonic clock at an earlier time; ``level``: by how many it is now. 0.0 if the two differ by no more than
    ``TOLERANCE``."""
    return level - before if abs(level - before) > TOLERANCE else 0.0
