"""What happens next to a job: one pure function over what is known, so that every rule can be tested as a table.

``decide(view, now)`` reads no clock, no disk and no database. The reconciler loads a view, calls it, and applies the answer.

The rules for an attempt that has ended:

1. A fault that cannot heal (budget ``fatal``) ends the job at once, unless a cancel was wanted.
2. The final checkpoint is committed and the end was clean or a graceful stop: the job is done, whatever was wanted.
3. A clean exit while a stop was wanted, without the final checkpoint, is that stop and no success.
4. A wanted suspend or cancel is reached once nothing runs, however the attempt ended; the budgets still count it.
5. Otherwise the cause's budget decides between another attempt (failures: the first at once, then after a back-off) and the
   end of the job.
   What an exit code of the job's own code counts as is the spec's to say (``treatment``).
   An exception that ended the attempt before it too, at the same line and before the first step of the rank that raised it,
   ends it: a third attempt would end likewise.
   Three attempts in a row that commit no new step end it too, where the last was ended from outside as many as it may have
   failures, if these are more. A suspended attempt is a pause that somebody asked for, not
   a try that came to nothing: it neither adds to that row nor breaks it; nor does one that was taken out of its engine's
   queue, or stopped here for a job of higher priority or since its agent is of another version. An unmanaged one (a script
   without a Session) breaks it: it ran, and whether it got on is known to the script alone.
   Its failures count as ever, and since no progress of it is seen, none is forgiven. One that gets a SIGTERM which nobody here
   sent, again and again, may be sending it itself: its starts are spaced as if it had failed, so that one that ran for longer
   than that waits for nothing. So are those that end by a rule ``retry``, of scripts with and without a Session, and those that
   the job's own interpreter or image refuses, being of another protocol: later each time, until one commits a new step or runs
   for longer than the longest back-off.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from ratchet_contract.hearing import hears_within
from ratchet_contract.phases import Budget, Cause, Desired, Event, JobPhase, Outcome
from ratchet_contract.plural import counted
from ratchet_service.decision import Action, Alive, AttemptEnd, Counters, Decision, JobView
from ratchet_service.treatment import Treatment, treatment

MAX_BACKOFF: Final = 300.0
"""Seconds; delays double up to this."""
BEYOND: Final = timedelta(seconds=2 * MAX_BACKOFF)
"""No back-off ends so much later than now: such a time was written by a clock that has been set back since, and holds nothing."""
JITTER: Final = 0.2
"""A delay is drawn from [1 - JITTER, 1 + JITTER] times its nominal value."""
LOST_FACTOR: Final = 2.0
"""Attempts that were lost wait this much longer than failed ones: the machine, not the job, needs the time."""
RETRIED_AT_ONCE: Final = frozenset({Cause.RANK_KILLED, Cause.OOM, Cause.EXCEPTION})
"""What need not come again: the first such failure since the last progress waits for nothing. After the others (a hang, a disk
that refuses a checkpoint, a lost attempt) it is the machine that needs the time."""
NO_PROGRESS_LIMIT: Final = 3
"""Attempts in a row; as many as ``max_failures`` where that is more and the end came from outside."""
FROM_OUTSIDE: Final = frozenset({Cause.RANK_KILLED, Cause.OOM})
"""Whatever is lost comes from outside as well."""


def decide(view: JobView, now: datetime) -> Decision:
    """The next move for one job. Raises ``ValueError`` for a view that cannot be (an active job without an attempt)."""
    if view.phase is JobPhase.QUEUED:
        return _queued(view, now)
    if not view.phase.active:
        return Decision(Action.NOTHING, counters=view.counters)
    if view.attempt is None:
        raise ValueError(f"job {view.job_id} is {view.phase} but has no attempt")
    if isinstance(view.attempt, AttemptEnd):
        return _ended(view, view.attempt, now)
    return _alive(view, view.attempt)


def backoff_seconds(job_id: str, epoch: int, nth: int, first: float) -> float:
    """Delay before the ``nth`` retry in a row (from 1): ``first`` doubled each time, up to ``MAX_BACKOFF``, with jitter.

    The jitter is a hash of job and attempt: the same whenever and by whomever it is computed.
    """
    digest = hashlib.sha256(f"{job_id}/{epoch}".encode()).digest()
    unit = int.from_bytes(digest[:8], "big") / 2**64
    nominal = first * 2.0 ** min(nth - 1, 40)
    return min(MAX_BACKOFF, nominal * (1 - JITTER + 2 * JITTER * unit))


def _queued(view: JobView, now: datetime) -> Decision:
    if view.limits.timeout is not None and view.running_seconds >= view.limits.timeout:
        return Decision(
            Action.END,
            Event.END_FAILED,
            counters=view.counters,
            reason=Cause.TIMEOUT.value,
            message=_timeout_text(view.job_id, view.limits.timeout),
        )
    if view.not_before is not None and now < view.not_before <= now + BEYOND:
        return Decision(Action.WAIT, counters=view.counters, not_before=view.not_before)
    return Decision(Action.LAUNCH, counters=view.counters)


def _alive(view: JobView, seen: Alive) -> Decision:
    if seen.asked is not None:
        if seen.asked >= seen.killable_after:
            return Decision(Action.KILL, cause=seen.asked_cause, counters=view.counters)
        return Decision(Action.NOTHING, counters=view.counters)
    if seen.other_protocol and not (seen.unmanaged and view.desired is Desired.RUN):
        # No report of its agent is understood, so no wish reaches it but a signal, on which it saves and ends. One that has not
        # begun is not waited for: it may not understand this service's files either.
        cause = Cause.UPGRADE if view.desired is Desired.RUN else view.desired_cause or _WANTED[view.desired]
        return Decision(Action.STOP if seen.seen else Action.KILL, cause=cause, counters=view.counters)
    if seen.waiting and not seen.seen and view.desired is not Desired.RUN:
        return Decision(Action.KILL, cause=view.desired_cause or _WANTED[view.desired], counters=view.counters)
    if not seen.seen and seen.age >= seen.launch_deadline:
        return Decision(Action.KILL, cause=Cause.LAUNCHER_ERROR, counters=view.counters)
    if view.desired is not Desired.RUN:
        # It may only have heard of the wish so late, and then its ranks have all of their time from there.
        if seen.wished >= view.limits.stop_grace + hears_within(view.limits.stop_grace):
            cause = Cause.API_CANCEL if view.desired is Desired.CANCEL else Cause.HANG
            return Decision(Action.STOP, cause=cause, counters=view.counters)
        return Decision(Action.NOTHING, counters=view.counters)
    if view.limits.timeout is not None and view.running_seconds + seen.running >= view.limits.timeout:
        return Decision(Action.STOP, cause=Cause.TIMEOUT, counters=view.counters)
    return Decision(Action.NOTHING, counters=view.counters)


_WANTED: Final = {
    Desired.SUSPEND: Cause.API_SUSPEND,
    Desired.CANCEL: Cause.API_CANCEL,
    Desired.PREEMPT: Cause.API_PREEMPT,
}
_STOPPED: Final = (Outcome.SUCCEEDED, Outcome.PREEMPTED, Outcome.SUSPENDED, Outcome.CANCELLED)


def _ended(view: JobView, end: AttemptEnd, now: datetime) -> Decision:
    if end.finished and (end.cause is Cause.COMPLETED or (end.cause.outcome in _STOPPED and not view.limits.script)):
        return _over(view, Event.END_SUCCEEDED, _as(Cause.COMPLETED), view.counters, None, None)
    cause = end.cause
    if cause is Cause.COMPLETED:
        if view.desired is Desired.RUN:
            return _over(view, Event.END_SUCCEEDED, _as(cause), view.counters, None, None)
        cause = view.desired_cause or _WANTED[view.desired]
    treated = treatment(cause, end, view.limits.exit_rules)
    moved = view.desired_cause is Cause.HIGHER_PRIORITY
    counters = count(view.counters, treated, end, moved=moved)
    if view.desired is Desired.CANCEL or cause is Cause.API_CANCEL:
        return _over(view, Event.END_CANCELLED, treated, counters, *_unless(treated, Outcome.CANCELLED, end))
    if treated.budget is Budget.FATAL:
        timeout = view.limits.timeout if cause is Cause.TIMEOUT else None
        text = end.message if timeout is None else _timeout_text(view.job_id, timeout)
        if treated.rule is not None:
            return _over(view, Event.END_FAILED, treated, counters, "exit-code", _last(treated, end))
        return _over(view, Event.END_FAILED, treated, counters, cause.value, text)
    if view.desired is Desired.SUSPEND:
        return _over(view, Event.END_SUSPENDED, treated, counters, *_unless(treated, Outcome.SUSPENDED, end))
    exhausted = _exhausted(view, treated, counters, end)
    if exhausted is not None:
        return exhausted
    return _requeue(view, treated, counters, end, now)


def count(counters: Counters, treated: Treatment, end: AttemptEnd, *, moved: bool = False) -> Counters:
    """The counters after an attempt that ended so; real progress forgives earlier failures, never preemptions. ``moved``: it was
    stopped here for another job."""
    moved = moved or treated.cause is Cause.UPGRADE
    taken = (moved or not end.begun) and treated.outcome is Outcome.PREEMPTED  # or out of its engine's queue
    if end.unmanaged:
        counters = replace(counters, no_progress=0)
    elif treated.outcome is not Outcome.SUSPENDED and not taken:
        counters = replace(counters, no_progress=0 if end.progress else counters.no_progress + 1)
    if end.progress:
        counters = replace(counters, failures=0, no_progress=0)
    spaced = _spaced(treated, end)
    got_on = end.progress or end.seconds >= MAX_BACKOFF
    counters = replace(counters, retries=(0 if got_on else counters.retries) + 1 if spaced else 0)
    if treated.budget is Budget.PREEMPTIONS:
        return replace(counters, preemptions=counters.preemptions + 1)
    if treated.budget in (Budget.FAILURES, Budget.FATAL):
        return replace(counters, failures=counters.failures + 1)
    return counters


def _exhausted(view: JobView, treated: Treatment, counters: Counters, end: AttemptEnd) -> Decision | None:
    limits, last = view.limits, _last(treated, end)
    if treated.budget is Budget.FAILURES and counters.failures > limits.max_failures:
        kind = "of a script without a Session" if end.unmanaged else "without progress"
        text = f"{counted(counters.failures, 'failure')} {kind}, {limits.max_failures} allowed (policy.max_failures). "
        text += f"{last} {_saves_failed(view) if end.cause is Cause.CHECKPOINT_ERROR else _again(view)}"
        return _over(view, Event.END_FAILED, treated, counters, "max-failures", text)
    if (
        treated.budget is Budget.PREEMPTIONS
        and limits.max_preemptions is not None
        and counters.preemptions > limits.max_preemptions
    ):
        text = f"{counted(counters.preemptions, 'preemption')}, {limits.max_preemptions} allowed (policy.max_preemptions). {last}"
        text += f" `ratchet resume {view.job_id}` goes on, and counts anew."
        return _over(view, Event.END_FAILED, treated, counters, "max-preemptions", text)
    if treated.budget is Budget.FAILURES and _fails_at_its_start(end):
        text = (
            "Two attempts in a row ended with the same error at the same line, and made no step: it is not tried again. "
            f"{last} {_again(view)}"
        )
        return _over(view, Event.END_FAILED, treated, counters, "same-error", text)
    if treated.outcome is not Outcome.SUSPENDED and counters.no_progress >= _no_progress_limit(view, treated):
        row = counted(counters.no_progress, "attempt")
        text = f"{row} in a row committed no new step. {last} {_no_progress_cure(view, end)}"
        return _over(view, Event.END_FAILED, treated, counters, "no-progress", text)
    return None


def _fails_at_its_start(end: AttemptEnd) -> bool:
    """With the error of the attempt before. Of a script without a Session no step is seen: one that ran for long has not failed
    at its start."""
    if end.repeated_error is None:
        return False
    return end.seconds < MAX_BACKOFF if end.unmanaged else end.repeated_error <= (end.base_step or 0)


def _again(view: JobView) -> str:
    resume = f"Fix its cause; then `ratchet resume {view.job_id}`"
    return (
        f"{resume}, which runs the same code again, or with changed code `--code DIR`."
        if view.limits.other_code
        else f"{resume}."
    )


def _saves_failed(view: JobView) -> str:
    return (
        "Its saves failed: do what the last failure says (its checkpoint-failed events have all); then "
        f"`ratchet resume {view.job_id}`."
    )


def _no_progress_limit(view: JobView, treated: Treatment) -> int:
    outside = treated.cause in FROM_OUTSIDE or treated.outcome is Outcome.LOST
    return max(NO_PROGRESS_LIMIT, view.limits.max_failures) if outside else NO_PROGRESS_LIMIT


def _no_progress_cure(view: JobView, end: AttemptEnd) -> str:
    """A job that gets on and does not save is told from one that does not get on."""
    job_id = view.job_id
    if end.cause is Cause.CHECKPOINT_ERROR:
        return _saves_failed(view)
    if end.repeated_error is not None:
        return f"That is the same error at the same line and step as the attempt before. {_again(view)}"
    if end.unsaved:
        other = (
            f"`ratchet fork {job_id} --set"
            if end.base_step
            else "submit it again (it has no checkpoint to fork) with `--set"
        )
        return (
            f"It did {counted(end.unsaved, 'new step')}, and was ended before one was saved. If it has "
            f"checkpoint-failed events, do what they say, then `ratchet resume {job_id}`. Else save more often, or give it more "
            f"notice: {other} checkpoint.every_steps=N` (or checkpoint.every_seconds, policy.stop_grace)."
        )
    return f"It finished no new step: read its logs. {_again(view)}"


def _requeue(view: JobView, treated: Treatment, counters: Counters, end: AttemptEnd, now: datetime) -> Decision:
    delay = _delay(view, treated, counters, end)
    if delay <= 0.0:
        once = " Tried again at once." if treated.budget is Budget.FAILURES else ""
        return _over(view, Event.END_REQUEUE, treated, counters, treated.cause.value, _last(treated, end) + once)
    text = f"{_last(treated, end)} Tried again after {delay:.1f} s."
    return replace(
        _over(view, Event.END_REQUEUE, treated, counters, "backoff", text), not_before=now + timedelta(seconds=delay)
    )


def _delay(view: JobView, treated: Treatment, counters: Counters, end: AttemptEnd) -> float:
    """Seconds until the next attempt may start; 0 or less: at once."""
    first = view.limits.backoff * (LOST_FACTOR if treated.outcome is Outcome.LOST else 1.0)
    if treated.budget is Budget.FAILURES:
        nth = counters.failures - (treated.cause in RETRIED_AT_ONCE)
        return backoff_seconds(view.job_id, view.epoch, nth, first) if nth else 0.0
    if _spaced(treated, end):
        return backoff_seconds(view.job_id, view.epoch, counters.retries, first) - end.seconds
    if end.unmanaged and (treated.cause is Cause.SIGTERM or treated.rule is not None):
        return backoff_seconds(view.job_id, view.epoch, counters.preemptions, first) - end.seconds
    return 0.0


def _spaced(treated: Treatment, end: AttemptEnd) -> bool:
    """It counts against nothing and may come again at once: by a rule ``retry``, or since an interpreter that was not upgraded
    with the service refused the attempt before it began to train."""
    refused = treated.cause is Cause.UPGRADE and end.base_step is None
    return treated.budget is Budget.NONE and (treated.rule is not None or refused)


def _over(
    view: JobView, event: Event, treated: Treatment, counters: Counters, reason: str | None, message: str | None
) -> Decision:
    return Decision(Action.END, event, treated.cause, counters, None, reason, message, treated.outcome, treated.rule)


def _as(cause: Cause) -> Treatment:
    return Treatment(cause, cause.outcome, cause.budget)


def _unless(treated: Treatment, outcome: Outcome, end: AttemptEnd) -> tuple[str | None, str | None]:
    """No reason when the attempt ended as wanted; else the cause, so that the job tells of it."""
    return (None, None) if treated.outcome is outcome else (treated.cause.value, _last(treated, end))


def _last(treated: Treatment, end: AttemptEnd) -> str:
    by = f" ({treated.rule})" if treated.rule is not None else ""
    return f"The last attempt ended with {treated.cause.value}{by}" + (
        f": {end.message.rstrip('.')}." if end.message else "."
    )


def _timeout_text(job_id: str, timeout: float) -> str:
    return (
        f"The attempts ran for {timeout:g} s in all, which is policy.timeout. The last checkpoint is kept: "
        f"`ratchet resume {job_id}` goes on from it for as long again, `ratchet fork {job_id} --set policy.timeout=SECONDS` "
        "for longer."
    )
