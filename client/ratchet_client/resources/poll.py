"""Polls a job until it reaches a phase, across restarts of the service."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from ratchet_client.http.errors import NOT_A_SERVICE, DeadlineReached, ServiceFault, ServiceUnreachable
from ratchet_contract.api.views import HookView, JobView
from ratchet_contract.phases import JobPhase
from ratchet_contract.plural import pluralize

T = TypeVar("T")
WhichAttempt: TypeAlias = int | Literal["all"] | None
"""The attempt whose logs are read. None: the newest (and, when following, later ones)."""
Outage: TypeAlias = ServiceUnreachable | ServiceFault
TERMINAL: Final = frozenset(phase for phase in JobPhase if phase.terminal)
_GROWTH = 1.5
_SHOWN = 5
"""Metrics in a snapshot's ``repr``."""


@dataclass(frozen=True)
class Snapshot:
    """The state of a job at one moment. ``metrics``: newest value of every series. ``at``: time by this machine's clock."""

    job: JobView
    hook: HookView
    metrics: Mapping[str, float]
    at: datetime

    def __repr__(self) -> str:
        newest = [f"{name} {value:.6g}" for name, value in self.metrics.items()]
        shown = [*newest[:_SHOWN], *([f"{len(newest) - _SHOWN} more"] if len(newest) > _SHOWN else [])]
        where = f"{self.job.phase}, step {self.job.progress.step_text()}, attempt {self.job.attempt}"
        return f"<Snapshot of {self.job.name}: {', '.join([where, *shown])}>"

    def _repr_html_(self) -> str:
        return self.job._repr_html_() + self.hook._repr_html_()


class Series(NamedTuple):
    """One curve: values by step. ``plt.plot(*series)`` draws it; ``pandas.Series(series.values, series.steps)`` converts it.
    Steps increase; values may be NaN."""

    steps: list[int]
    values: list[float]

    def __repr__(self) -> str:
        if not self.steps:
            return "Series(no point)"
        points = pluralize(len(self.steps), "point")
        return f"Series({points}, steps {self.steps[0]} to {self.steps[-1]}, last value {self.values[-1]:.6g})"


@dataclass(frozen=True)
class Pace:
    """The times of polls, in seconds. The wait between two polls grows from ``first`` to ``longest``, and restarts at ``first``
    when the phase changes. ``patience``: the time without a response after which polling without a deadline fails."""

    first: float
    longest: float
    patience: float = 0.0


def retry_poll(fetch: Callable[[], T], patience: float, at_first: float | None = None) -> Iterator[T | Outage]:
    """Call ``fetch`` at each iteration, and yield its result, or the ``ServiceUnreachable`` or ``ServiceFault`` that it raised.
    After ``patience`` seconds without a result, the error is raised instead. Before the first result, ``at_first`` is used in
    place of ``patience``, unless it is None. If another program responds, the error is raised at once."""
    away, reached = None, False
    while True:
        started = time.monotonic()
        seen: T | Outage
        try:
            seen = fetch()
        except (ServiceUnreachable, ServiceFault) as error:
            away = started if away is None else away
            if error.code == NOT_A_SERVICE or time.monotonic() - away >= (
                patience if reached or at_first is None else at_first
            ):
                raise
            seen = error
        else:
            away, reached = None, True
        yield seen


def poll_until(
    job_id: str, fetch: Callable[[], T], job_of: Callable[[T], JobView], until: Collection[JobPhase],
    deadline: float | None, pace: Pace,
) -> Iterator[T]:  # fmt: skip
    """Yield the results of ``fetch`` until the job's phase is one of ``until`` or the job has ended. Sleeps between two calls.
    Raises ``DeadlineReached`` after ``deadline`` seconds; without a deadline, the error of ``retry_poll`` after
    ``pace.patience`` seconds without a result. Raises ``ServiceFault`` at once if another program responds."""
    started = time.monotonic()
    end = math.inf if deadline is None else started + deadline
    delay, phase, last = pace.first, None, ""
    for seen in retry_poll(fetch, pace.patience if deadline is None else math.inf):
        if isinstance(seen, Outage):
            last = seen.detail
        else:
            job = job_of(seen)
            if job.phase is not phase:
                phase, delay = job.phase, pace.first
            yield seen
            if phase in until or phase in TERMINAL:
                return
            last = f"it is {phase}, step {job.progress.step}"
        if deadline is not None and time.monotonic() >= end:
            wanted = ", ".join(sorted(until)) or "at its end"
            raise DeadlineReached(f"job {job_id} was not {wanted} after {deadline:g} s: {last}; the job continues")
        time.sleep(max(0.0, min(started + delay, end) - time.monotonic()))
        started = time.monotonic()
        delay = min(delay * _GROWTH, pace.longest)
