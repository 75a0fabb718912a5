"""Finds the ranks for which the others wait at each step. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WINDOWS: Final = 5
"""Reports in a row that must agree. A rank sends one about every second."""
FACTOR: Final = 1.5
MIN_SECONDS: Final = 0.02

Times = Mapping[str, Sequence[Sequence[float]]]
"""Rank (as text) -> its newest reports, the oldest first: seconds until its gradients were ready, and of the whole step."""


@dataclass(frozen=True)
class Straggler:
    """A slow rank. Seconds per step, medians: ``ready`` until its first gradients are ready, ``others`` the same of the other
    ranks, ``step`` of the whole step."""

    rank: int
    ready: float
    others: float
    step: float

    @property
    def share(self) -> float:
        """The largest share of the step for which the others may wait for it. On CUDA less: a GPU may still have work when its
        host is late."""
        return min(1.0, (self.ready - self.others) / self.step) if self.step > 0 else 0.0

    def sentence(self, host: str | None) -> str:
        """Return the event's message."""
        where = "" if host is None else f" on {host}"
        return (
            f"rank {self.rank}{where} is slow: its first gradients are ready {self.ready * 1000:.0f} ms after the start of a "
            f"step, those of the others after {self.others * 1000:.0f} ms: the others wait for up to {self.share:.0%} of a step"
        )


def find_stragglers(times: Times, world_size: int) -> list[Straggler]:
    """Return the ranks whose every one of the last ``WINDOWS`` reports is slower than each of the medians of the other ranks' by
    ``FACTOR`` and ``MIN_SECONDS``. Empty until all ranks have sent that many."""
    if world_size < 2 or len(times) < world_size or any(len(windows) < WINDOWS for windows in times.values()):
        return []
    found = []
    # no median of the others is below this
    columns = (sorted(windows[i][0] for windows in times.values()) for i in range(-WINDOWS, 0))
    floor = max(column[(len(column) - 2) // 2] for column in columns)
    for rank, windows in times.items():
        if min(window[0] for window in windows[-WINDOWS:]) <= floor + MIN_SECONDS:
            continue  # as most ranks: there may be thousands
        others = [
            statistics.median(other[window][0] for name, other in times.items() if name != rank)
            for window in range(-WINDOWS, 0)
        ]
        ready = [window[0] for window in windows[-WINDOWS:]]
        if min(ready) > max(others) * FACTOR and min(ready) > max(others) + MIN_SECONDS:
            step = statistics.median(window[1] for window in windows[-WINDOWS:])
            found.append(Straggler(int(rank), statistics.median(ready), statistics.median(others), step))
    return found
