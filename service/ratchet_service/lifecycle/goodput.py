"""Where a job's time went. *Goodput* is the share of a job's wall-clock time, without requested pauses, that was spent on steps
which a later attempt or the result builds on ("ML productivity goodput", Google Cloud blog, April 2024). Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from ratchet_contract.phases import Cause, Outcome


@dataclass(frozen=True)
class Span:
    """Times and steps of one attempt; a time that is None has not come, or is not known."""

    created: datetime
    until: datetime  # its end, or now
    begun: datetime | None = None  # its first agent began
    training: datetime | None = None  # its first step began
    stop: datetime | None = None  # its first agent received a stop request
    end_began: datetime | None = None  # the fault that ended its ranks began; for a hang: they last moved
    steps_done: int = 0
    steps_lost: int = 0
    stall: float = 0.0  # seconds for which rank 0's training stood still for saves
    unmanaged: bool = False  # a script without a Session


class Parts(NamedTuple):
    """Seconds of each part of a job's or an attempt's time; each second belongs to one part."""

    queued: float = 0.0  # in no attempt, or in one that its engine has not started
    launching: float = 0.0  # from the first agent to the first step
    useful: float = 0.0  # training, evaluations included; unsaved steps until they are known to be lost
    lost: float = 0.0  # steps that are in no checkpoint, at the attempt's own pace
    stall: float = 0.0  # rank 0's training stood still for a save
    stopping: float = 0.0  # from the stop's request, or the beginning of a fault, to the end
    unseen: float = 0.0  # a script without a Session ran: only the script knows what counted

    @property
    def wall(self) -> float:
        """The sum of all parts: the wall-clock time."""
        return sum(self)

    @property
    def goodput(self) -> float | None:
        """The useful share of the wall-clock time, from 0 to 1; None if it cannot be judged, or no time has passed."""
        return None if self.unseen > 0 or self.wall <= 0 else self.useful / self.wall


def parts_of(span: Span) -> Parts:
    """Return the parts of one attempt, in seconds; they add up to the time from ``created`` to ``until``."""
    end = max(span.created, span.until)

    def clamp(at: datetime | None, low: datetime) -> datetime:
        """Return ``at``, limited to the time from ``low`` to the attempt's end; the end if ``at`` is None."""
        return end if at is None else min(max(at, low), end)

    # kept in order: an error of a worker's clock moves seconds to the next part and loses none
    begun = clamp(span.begun, span.created)
    training = clamp(span.training, begun) if span.begun is not None else end
    ends = [at for at in (span.stop, span.end_began) if at is not None]
    stop = clamp(min(ends), begun) if ends and span.begun is not None else end
    queued = _seconds(span.created, begun)
    if stop <= training:  # it never got to train
        return Parts(queued=queued, launching=_seconds(begun, stop), stopping=_seconds(stop, end))
    trained = _seconds(training, stop)
    known = Parts(queued=queued, launching=_seconds(begun, training), stopping=_seconds(stop, end))
    if span.unmanaged:
        return known._replace(unseen=trained)
    stall = min(max(0.0, span.stall), trained)
    done = max(0, span.steps_done)
    share = min(1.0, max(0, span.steps_lost) / done) if done else 1.0
    lost = (trained - stall) * share
    return known._replace(useful=trained - stall - lost, lost=lost, stall=stall)


def total_parts(spans: Iterable[Span], submitted: datetime, until: datetime, paused_seconds: float) -> Parts:
    """Return the parts of a whole job. ``until``: its end, the beginning of its present pause, or now. ``paused_seconds``: the
    length of earlier pauses; they belong to no part."""
    parts = [parts_of(span) for span in spans]
    sums = Parts(*(sum(values) for values in zip(*parts, strict=True))) if parts else Parts()
    rest = _seconds(submitted, max(submitted, until)) - paused_seconds - sums.wall
    return sums._replace(queued=sums.queued + max(0.0, rest))


def _seconds(begin: datetime, end: datetime) -> float:
    """Return the seconds from ``begin`` to ``end``."""
    return (end - begin).total_seconds()


_RATCHET_STOP_CAUSES = (Cause.API_SUSPEND, Cause.API_CANCEL, Cause.API_PREEMPT, Cause.HIGHER_PRIORITY)


def notice_given(cause: Cause | None, stop_grace: float, preemption_notice: float | None) -> float:
    """Return the seconds that the ranks had for their last save: ``stop_grace`` after a suspend, a cancel, or a preemption by
    request or for a higher priority; otherwise ``preemption_notice``, or ``stop_grace`` if that is None."""
    outside = cause is None or cause not in _RATCHET_STOP_CAUSES
    return preemption_notice if outside and preemption_notice is not None else stop_grace


def notice_used(
    outcome: Outcome | None, stop: datetime | None, saved: datetime | None, ended: datetime | None, *, unsaved: bool
) -> float | None:
    """Return the seconds from the stop request ``stop`` to the save that it led to, ``saved``. Without such a save, return the
    seconds to the attempt's end if it left nothing to save. Return None in all other cases, such as without a stop request or
    after a failure. ``unsaved``: the attempt lost steps."""
    if stop is None:
        return None
    if saved is not None:
        return max(0.0, _seconds(stop, saved))
    if unsaved or ended is None or outcome in (None, Outcome.FAILED, Outcome.LOST):
        return None
    return max(0.0, _seconds(stop, ended))
