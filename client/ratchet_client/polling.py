"""Looking at a job again and again until it is where it is wanted, across restarts of the service."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple, TypeVar

from ratchet_client.errors import DeadlineReached, ServiceUnreachable
from ratchet_contract.api import HookView, JobView
from ratchet_contract.phases import JobPhase
from ratchet_contract.plural import counted

T = TypeVar("T")
TERMINAL: Final = frozenset(phase for phase in JobPhase if phase.terminal)
_GROWTH = 1.5
_SHOWN = 5
"""Metrics in a snapshot's ``repr``."""


@dataclass(frozen=True)
class Snapshot:
    """A job at one moment. ``metrics`` holds the newest value of every series (read-only); ``at`` is this machine's time, UTC.

    The job was read before hook and metrics, so those of a job that has ended are its last ones.
    """

    job: JobView
    hook: HookView
    metrics: Mapping[str, float]
    at: datetime

    def __repr__(self) -> str:
        newest = [f"{name} {value:.6g}" for name, value in self.metrics.items()]
        shown = [*newest[:_SHOWN], *([f"{len(newest) - _SHOWN} more"] if len(newest) > _SHOWN else [])]
        where = f"{self.job.phase}, step {self.job.progress.out_of()}, attempt {self.job.attempt}"
        return f"<Snapshot of {self.job.name}: {', '.join([where, *shown])}>"

    def _repr_html_(self) -> str:
        return self.job._repr_html_() + self.hook._repr_html_()


class Series(NamedTuple):
    """One curve: ``plt.plot(*series)`` or ``pandas.Series(series.values, series.steps)``. Steps grow; values may be nan."""

    steps: list[int]
    values: list[float]

    def __repr__(self) -> str:
        if not self.steps:
            return "Series(no point)"
        points = counted(len(self.steps), "point")
        return f"Series({points}, steps {self.steps[0]} to {self.steps[-1]}, last value {self.values[-1]:.6g})"


@dataclass(frozen=True)
class Pace:
    """Seconds. ``first`` to ``longest``: between the beginnings of two looks, growing while the phase stays the same.
    ``patience``: how long a service may be away when there is no deadline, beyond the retries of one call."""

    first: float
    longest: float
    patience: float = 0.0


def tries(look: Callable[[], T], patience: float, at_first: float | None = None) -> Iterator[T | ServiceUnreachable]:
    """What ``look`` sees each time that the next is asked for, or the error while the service is away.

    Raises ``ServiceUnreachable`` when it has been away for ``patience`` seconds (``at_first``: where nothing ever answered).
    """
    away, reached = None, False
    while True:
        started = time.monotonic()
        seen: T | ServiceUnreachable
        try:
            seen = look()
        except ServiceUnreachable as error:
            away = started if away is None else away
            if time.monotonic() - away >= (patience if reached or at_first is None else at_first):
                raise
            seen = error
        else:
            away, reached = None, True
        yield seen


def looks(
    job_id: str, look: Callable[[], T], job_of: Callable[[T], JobView], until: Collection[JobPhase],
    deadline: float | None, pace: Pace,
) -> Iterator[T]:  # fmt: skip
    """What ``look`` sees, until the job's phase is one of ``until`` or the job has ended: that is the last one.

    Raises ``DeadlineReached`` after ``deadline`` seconds, ``ServiceUnreachable`` when the patience ends.
    """
    begin = started = time.monotonic()
    delay, phase, last = pace.first, None, ""
    for seen in tries(look, pace.patience if deadline is None else math.inf):
        if isinstance(seen, ServiceUnreachable):
            last = seen.detail
        else:
            job = job_of(seen)
            if job.phase is not phase:
                phase, delay = job.phase, pace.first
            yield seen
            if phase in until or phase in TERMINAL:
                return
            last = f"it is {phase}, step {job.progress.step}"
        if deadline is not None and time.monotonic() + delay > begin + deadline:
            wanted = ", ".join(sorted(until)) or "at its end"
            raise DeadlineReached(f"job {job_id} was not {wanted} after {deadline:g} s: {last}; the job goes on")
        time.sleep(max(0.0, started + delay - time.monotonic()))
        started = time.monotonic()
        delay = min(delay * _GROWTH, pace.longest)
