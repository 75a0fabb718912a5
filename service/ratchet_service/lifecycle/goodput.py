"""Where a job's time went, and how much of it was training that counts. Pure: computes seconds from the times and steps of rows.

*Goodput* is the share of a job's wall-clock time that was spent on steps which a later attempt, or the result, builds on:
Google's "ML productivity goodput" (Google Cloud blog, April 2024) and the "effective training time" of reports on large runs.
Wall-clock time begins with the submission and ends with the job, or now; pauses on request (suspended, or ended and resumed
later) are left out. Each second belongs to exactly one part, so the parts add up to the wall-clock time:

- ``queued``: in no attempt (the queue, a back-off), or in an attempt that its engine has not started;
- ``launching``: from the first agent to the beginning of the first step: code, rendezvous, imports, reading the checkpoint;
- ``useful``: training, evaluations included, except for the next two;
- ``lost``: steps that were done and are in no checkpoint, at the attempt's own pace; if none was done, all of the training;
- ``stall``: rank 0's training stood still for a save (the other costs of saves are part of the pace);
- ``stopping``: from the stop's request, or from the beginning of what ended the ranks (a hang: when they last moved), to the end;
- ``unseen``: a script without a Session ran: only the script knows whether its time counted, and goodput is None.

Steps that a running attempt has not saved yet count as useful until they are known to be lost. Times of workers are by their own
clocks; they are kept in order, so an error of a clock moves seconds from one part to the next and loses none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from ratchet_contract.phases import Cause, Outcome


@dataclass(frozen=True)
class Span:
    """Times and steps of one attempt; a time that is None has not come, or is not known.

    ``begun``: when its first agent began; ``training``: when its first step began; ``until``: its end, or now; ``stop``: when its
    first agent received a stop request; ``end_began``: when the fault that ended its ranks began (for a hang: when they last
    moved). ``stall``: seconds for which rank 0's training stood still for saves; ``unmanaged``: it ran a script without a
    Session.
    """

    created: datetime
    until: datetime
    begun: datetime | None = None
    training: datetime | None = None
    stop: datetime | None = None
    end_began: datetime | None = None
    steps_done: int = 0
    steps_lost: int = 0
    stall: float = 0.0
    unmanaged: bool = False


class Parts(NamedTuple):
    """Seconds of each part; the module's text defines the parts."""

    queued: float = 0.0
    launching: float = 0.0
    useful: float = 0.0
    lost: float = 0.0
    stall: float = 0.0
    stopping: float = 0.0
    unseen: float = 0.0

    @property
    def wall(self) -> float:
        """The sum of all parts: the wall-clock time."""
        return sum(self)

    @property
    def goodput(self) -> float | None:
        """The useful share of the wall-clock time, from 0 to 1; None if some of the time cannot be judged (``unseen``), or none
        has passed."""
        return None if self.unseen > 0 or self.wall <= 0 else self.useful / self.wall


def parts_of(span: Span) -> Parts:
    """Return the parts of one attempt, in seconds; they add up to ``until - created``, or to 0 if that is negative."""
    end = max(span.created, span.until)

    def clamp(at: datetime | None, low: datetime) -> datetime:
        """Return ``at``, limited to the time from ``low`` to the attempt's end; the end if ``at`` is None."""
        return end if at is None else min(max(at, low), end)

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
    """Return the parts of a whole job. ``spans``: its attempts; ``until``: its end, the beginning of its present pause, or now;
    ``paused_seconds``: the length of all earlier requested pauses, which belong to no part. All other time outside of attempts
    is ``queued``."""
    parts = [parts_of(span) for span in spans]
    sums = Parts(*(sum(values) for values in zip(*parts, strict=True))) if parts else Parts()
    rest = _seconds(submitted, max(submitted, until)) - paused_seconds - sums.wall
    return sums._replace(queued=sums.queued + max(0.0, rest))


def _seconds(begin: datetime, end: datetime) -> float:
    """Return the seconds from ``begin`` to ``end``."""
    return (end - begin).total_seconds()


_RATCHET_STOP_CAUSES = (Cause.API_SUSPEND, Cause.API_CANCEL, Cause.API_PREEMPT, Cause.HIGHER_PRIORITY)


def notice_given(cause: Cause | None, stop_grace: float, preemption_notice: float | None) -> float:
    """Return the seconds that the ranks had for their last save. For a stop requested through Ratchet (``_RATCHET_STOP_CAUSES``)
    that is ``stop_grace``. Any other cause, or None, counts as a stop from outside: ``preemption_notice``, or ``stop_grace`` if
    that is None."""
    outside = cause is None or cause not in _RATCHET_STOP_CAUSES
    return preemption_notice if outside and preemption_notice is not None else stop_grace


def notice_used(
    outcome: Outcome | None, stop: datetime | None, saved: datetime | None, ended: datetime | None, *, unsaved: bool
) -> float | None:
    """Return the seconds of its notice that a stopped attempt used: from the stop request (``stop``) to the commit of the
    checkpoint that the stop led to (``saved``). If it led to no checkpoint because nothing was left to save, return the seconds
    to the attempt's end (``ended``).

    None if no stop was requested. If the stop led to no checkpoint, also None if steps remained ``unsaved``, or if the attempt
    failed, was lost or has not ended.
    """
    if stop is None:
        return None
    if saved is not None:
        return max(0.0, _seconds(stop, saved))
    if unsaved or ended is None or outcome in (None, Outcome.FAILED, Outcome.LOST):
        return None
    return max(0.0, _seconds(stop, ended))
