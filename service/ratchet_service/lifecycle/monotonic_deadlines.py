"""Counts elapsed time for the reconciler's deadlines by monotonic clocks, since wall clocks can be set. The count is stored, and
the next process continues it. A deadline that is counted in this way may expire late, but never early; only a count that cannot
be read is replaced by the wall clock's time."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any, Final, NamedTuple

from ratchet_service.db.clock import Clock

KEEP_SECONDS: Final = 30.0
"""Interval at which the counts of attempts with a ``policy.timeout`` are stored. A reconciler on another machine may count this
much too little."""


class Count(NamedTuple):
    """A stored count of elapsed time. ``seconds``: the time that had elapsed when the count was stored. ``boot``: the boot of the
    machine that stored it. ``monotonic``: what that machine's monotonic clock showed then."""

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
    """Return the seconds that an attempt has run by now; None if no agent of it has begun. ``stored``: the attempt's stored
    ``Count``. If it cannot be read, the wall clock's time since ``begun_at`` is returned."""
    if begun_at is None:
        return None
    found = carried_seconds(stored, clock, math.inf)
    return max(0.0, (clock.now() - begun_at).total_seconds()) if found is None else found


def carried_seconds(stored: Any, clock: Clock, max_gap: float) -> float | None:
    """Return the elapsed seconds of a deadline; None if ``stored`` is not a valid ``Count``. The time since the count was stored
    is included, but at most ``max_gap`` seconds. If the count is of another boot, this time is not known and is left out."""
    count = Count.parse(stored)
    if count is None:
        return None
    since = clock.monotonic() - count.monotonic if count.boot == clock.boot_id() else 0.0
    return count.seconds + min(max(0.0, since), max_gap)
