"""Rate limits: token buckets in this process's memory (each API process counts separately)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from ratchet_contract.errors import Refused

_MAX_CALLERS: Final = 10_000
"""Number of buckets kept. Beyond it, the least recently used bucket is dropped; its caller starts with a full bucket again."""


class Buckets:
    """Token buckets by caller: each caller is allowed ``rate`` requests per second on average, and ``burst`` requests at once.
    Thread-safe."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate, self._burst = rate, burst
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, caller: str, now: float, multiplier: int = 1) -> None:
        """Count one request of ``caller``, or raise ``Refused`` with ``retry_after``. ``now``: seconds, monotonic.
        ``multiplier``: factor of the limits."""
        rate, burst = self._rate * multiplier, self._burst * multiplier
        with self._lock:
            level, before = self._levels.pop(caller, (float(burst), now))
            level = min(float(burst), level + max(0.0, now - before) * rate)
            allowed = level >= 1.0
            self._levels[caller] = (level - 1.0 if allowed else level, now)
            if len(self._levels) > _MAX_CALLERS:
                self._levels.popitem(last=False)
        if not allowed:
            wait = (1.0 - level) / rate
            raise Refused(
                f"more than {rate:g} requests per second, or {burst} at once: try again in {wait:.1f} s",
                code="too-many-requests",
                retry_after=wait,
            )
