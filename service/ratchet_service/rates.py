"""How many requests a caller may make: token buckets in this process's memory (each of several APIs counts its own)."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from ratchet_contract.errors import Refused

_CALLERS: Final = 10_000
"""Buckets that are held; of more, the one that was used longest ago is forgotten, and begins full again."""


class Buckets:
    """``rate`` requests a second for each caller, ``burst`` at once. Thread-safe."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate, self._burst = rate, burst
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._one_at_a_time = threading.Lock()

    def take(self, caller: str, now: float, times: int = 1) -> None:
        """One request at ``now`` (seconds, monotonic) of a caller that has ``times`` the rate and the burst. Raises ``Refused``
        (``too-many-requests``) with ``retry_after``."""
        rate, burst = self._rate * times, self._burst * times
        with self._one_at_a_time:
            level, before = self._levels.pop(caller, (float(burst), now))
            level = min(float(burst), level + max(0.0, now - before) * rate)
            allowed = level >= 1.0
            self._levels[caller] = (level - 1.0 if allowed else level, now)
            if len(self._levels) > _CALLERS:
                self._levels.popitem(last=False)
        if not allowed:
            wait = (1.0 - level) / rate
            raise Refused(
                f"more than {rate:g} requests a second, {burst} at once: go on in {wait:.1f} s",
                code="too-many-requests",
                retry_after=wait,
            )
