"""Computes how long agents delay figures (metrics, progress, hook summaries), so that reports of many jobs leave the service time
for other work."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ratchet_contract.protocol.timing import MAX_CONTROL_DELAY_SECONDS

SHARE: Final = 0.2
"""Fraction of a core that all reports together may use."""
_MIN_DELAY_SECONDS: Final = 0.6
"""Seconds that agents wait anyway; shorter delays are not sent."""
_EXPIRY_SECONDS: Final = 2 * MAX_CONTROL_DELAY_SECONDS
"""Seconds without a report after which an agent is no longer counted."""
_COST_FACTOR: Final = 2.0
"""Total cost of a report as a multiple of its thread's CPU time, which is all that can be measured per report: the event loop's
part (HTTP, routing, handing requests to threads) is about as large."""
_MEAN_WEIGHT: Final = 0.05
"""Weight of one report in the running mean of their cost."""

Agent = tuple[str, int, int]
"""Job, attempt, node."""


class Pacing:
    """Computes the report delays of one service process, from the cost of recent reports and the number of agents.
    Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_reports: OrderedDict[Agent, float] = OrderedDict()
        """When each recently reporting agent last reported; oldest first."""
        self._cost = 0.0
        self._lock = threading.Lock()

    def record_report(self, agent: Agent, cpu_seconds: float) -> float:
        """Record the CPU time of ``agent``'s report. Return the seconds by which the agent must delay figures; 0.0: none."""
        now = self._clock()
        with self._lock:
            self._cost += (cpu_seconds - self._cost) * (_MEAN_WEIGHT if self._cost else 1.0)
            self._last_reports[agent] = now
            self._last_reports.move_to_end(agent)
            while self._last_reports and next(iter(self._last_reports.values())) < now - _EXPIRY_SECONDS:
                self._last_reports.popitem(last=False)
            delay = len(self._last_reports) * self._cost * _COST_FACTOR / SHARE
        return 0.0 if delay <= _MIN_DELAY_SECONDS else min(MAX_CONTROL_DELAY_SECONDS, delay)
