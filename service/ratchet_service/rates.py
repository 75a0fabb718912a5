"""How many requests a caller may make: token buckets in this process's memory (each of several APIs counts its own)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ratchet_contract.errors import Refused

_CALLERS: Final = 10_000
"""Buckets that are held; of more, the one that was used longest ago is forgotten, and begins full again."""


class Buckets:
    """``rate`` requests a second for each caller, ``burst`` at once. Not thread-safe: the event loop's own."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate, self._burst = rate, burst
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, caller: str, now: float) -> None:
        """One request at ``now`` (seconds, monotonic). Raises ``Refused`` (``too-many-requests``) with ``retry_after``."""
        level, before = self._levels.pop(caller, (float(self._burst), now))
        level = min(float(self._burst), level + (now - before) * self._rate)
        allowed = level >= 1.0
        self._levels[caller] = (level - 1.0 if allowed else level, now)
        if len(self._levels) > _CALLERS:
            self._levels.popitem(last=False)
        if not allowed:
            wait = (1.0 - level) / self._rate
            raise Refused(
                f"more than {self._rate:g} requests a second, {self._burst} at once: go on in {wait:.1f} s",
                code="too-many-requests",
                retry_after=wait,
            )
