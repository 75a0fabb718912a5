"""How long agents keep figures back, so that the reports of however many jobs leave the service time for the rest of its work.

Every answer to a report may say so (``REPORT_AFTER_HEADER``): a header, since an agent of a version that does not know it leaves
it alone, and keeps its own pace. What is no figure (a checkpoint, a phase, a result) is never kept back.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ratchet_contract.hearing import LONGEST

SHARE: Final = 0.2
"""Of a core, for all reports together."""
_NOTICED: Final = 0.6
"""Seconds; agents wait as long as this of their own accord."""
_AWAY: Final = 2 * LONGEST
"""Seconds after which who has not reported is not counted any more."""
_WHOLE: Final = 2.0
"""The event loop's part (HTTP, routing, what hands requests to threads) is about as much again as the thread's, which is what can
be measured of one report."""
_NEWEST: Final = 0.05
"""Weight of one report in the running mean of what they cost."""

Agent = tuple[str, int, int]
"""Job, attempt, node."""


class Pacing:
    """Of one process. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heard: OrderedDict[Agent, float] = OrderedDict()
        """Who has reported lately, and when; longest ago first."""
        self._cost = 0.0
        self._one_at_a_time = threading.Lock()

    def reported(self, agent: Agent, cpu_seconds: float) -> float:
        """``agent``'s report took a thread of this process ``cpu_seconds``. Returns the seconds until its next one that has only
        figures to tell; 0.0: as soon as it likes."""
        now = self._clock()
        with self._one_at_a_time:
            self._cost += (cpu_seconds - self._cost) * (_NEWEST if self._cost else 1.0)
            self._heard[agent] = now
            self._heard.move_to_end(agent)
            while self._heard and next(iter(self._heard.values())) < now - _AWAY:
                self._heard.popitem(last=False)
            wanted = len(self._heard) * self._cost * _WHOLE / SHARE
        return 0.0 if wanted <= _NOTICED else min(LONGEST, wanted)
