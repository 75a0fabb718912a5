"""Measures when a rank is ready to reduce its gradients. Collectives make all ranks equally slow: only the time before the first
one shows which rank the others wait for."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from ratchet_contract.protocol.messages import StepTimes

_MAX_STEPS: Final = 256
"""Most steps of one report, the newest."""


class StepClock:
    """Times of one rank's steps, by the monotonic clock of its host. Nothing waits for a GPU: its work counts only where the host
    waits for it. The time in step boundaries, where ranks may wait for one another, is left out."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_MAX_STEPS)
        self._began_at: float | None = None  # later by the time spent in a boundary since
        self._boundary_at = 0.0
        self._ahead = 0.0  # seconds in which the open step has loaded data of the next one

    def begin_step(self) -> None:
        """Record that the boundary after a step has ended: what follows, such as loading data, is part of the next step."""
        self._began_at, self._ahead = time.monotonic() - self._ahead, 0.0

    def enter_boundary(self) -> None:
        """Record the beginning of the boundary before a step; ``leave_boundary`` follows."""
        self._boundary_at = time.monotonic()

    def leave_boundary(self) -> None:
        """Record the end of the boundary before a step."""
        now = time.monotonic()
        self._began_at = now if self._began_at is None else self._began_at + now - self._boundary_at

    @contextmanager
    def loading_ahead(self) -> Iterator[None]:
        """Count the time in the block, within an open step, to the next step."""
        began_at = time.monotonic()
        try:
            yield
        finally:
            self._ahead += time.monotonic() - began_at

    def end_step(self, first_bucket_at: float) -> None:
        """Record that the step's work has ended. ``first_bucket_at``: when the hook was last called for the first bucket."""
        if self._began_at is not None and first_bucket_at > self._began_at:
            self._steps.append((first_bucket_at - self._began_at, time.monotonic() - self._began_at - self._ahead))

    def leave_out_step(self) -> None:
        """Leave the step out: an evaluation is part of it, or comes before it."""
        self._began_at, self._ahead = None, 0.0

    def take(self) -> StepTimes | None:
        """Return the medians of the steps since the last call; None: there were none."""
        if not self._steps:
            return None
        ready, whole = (statistics.median(column) for column in zip(*self._steps, strict=True))
        self._steps.clear()
        return StepTimes(ready=ready, step=whole)
