"""Decides what happens next to a job, by one pure function of what is known about it, ``decide``.

When an attempt has ended, the first of these facts that applies decides: training has finished and ended cleanly, a cancel was
requested, there is a fault that cannot heal, a suspend was requested. Otherwise budgets, repeated errors and missing progress
decide between another attempt, perhaps after a back-off, and the end of the job.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final

from ratchet_contract.phases import Budget, Cause, Desired, Event, JobPhase, JobReason, Outcome, Reason
from ratchet_contract.plural import pluralize
from ratchet_contract.protocol.timing import max_control_delay
from ratchet_service.lifecycle.decision import (
    Action,
    Alive,
    AttemptEnd,
    Counters,
    Decision,
    JobView,
    Treatment,
    treatment,
)

MAX_BACKOFF: Final = 300.0
"""Seconds; delays double up to this."""
MAX_BACKOFF_AHEAD: Final = timedelta(seconds=2 * MAX_BACKOFF)
"""A back-off never ends later than this from now. A later time was written by a clock that has been set back since; it is
ignored."""
JITTER: Final = 0.2
"""A delay is drawn from [1 - JITTER, 1 + JITTER] times its nominal value."""
LOST_FACTOR: Final = 2.0
"""Lost attempts wait this many times as long as failed ones: the machine, not the job, needs the time."""
RETRIED_AT_ONCE: Final = frozenset({Cause.RANK_KILLED, Cause.OOM, Cause.EXCEPTION})
"""Causes that need not recur: if the first failure since the last progress has one of them, it is retried without delay. After
the others (a hang, a disk that refuses a checkpoint, a lost attempt) the machine needs the time."""
NO_PROGRESS_LIMIT: Final = 3
"""Attempts in a row; ``max_failures`` where that is more and the end came from outside."""
EXTERNAL_CAUSES: Final = frozenset({Cause.RANK_KILLED, Cause.OOM})
"""Causes from outside the job. The outcome ``LOST`` is from outside as well."""


def decide(view: JobView, now: datetime) -> Decision:
    """Return the next action for one job. Raises ``ValueError`` for an active job without an attempt."""
    if view.phase is JobPhase.QUEUED:
        return _decide_queued(view, now)
    if not view.phase.active:
        return Decision(Action.NOTHING, counters=view.counters)
    if view.attempt is None:
        raise ValueError(f"job {view.job_id} is {view.phase} but has no attempt")
    if isinstance(view.attempt, AttemptEnd):
        return _decide_ended(view, view.attempt, now)
    return _decide_alive(view, view.attempt)


def backoff_seconds(job_id: str, attempt: int, nth: int, first_delay: float) -> float:
    """Return the seconds before the ``nth`` retry in a row (from 1): ``first_delay``, doubled each time, within ``MAX_BACKOFF``,
    with deterministic jitter."""
    digest = hashlib.sha256(f"{job_id}/{attempt}".encode()).digest()
    unit = int.from_bytes(digest[:8], "big") / 2**64
    nominal = first_delay * 2.0 ** min(nth - 1, 40)
    return min(MAX_BACKOFF, nominal * (1 - JITTER + 2 * JITTER * unit))


def _decide_queued(view: JobView, now: datetime) -> Decision:
    """Decide for a queued job: end it at ``policy.timeout``, let it wait for the end of its back-off, or launch it."""
    if view.limits.timeout is not None and view.running_seconds >= view.limits.timeout:
        return Decision(
            Action.END,
            Event.END_FAILED,
            counters=view.counters,
            reason=Cause.TIMEOUT,
            message=_timeout_text(view.job_id, view.limits.timeout),
        )
    if view.not_before is not None and now < view.not_before <= now + MAX_BACKOFF_AHEAD:
        return Decision(Action.WAIT, counters=view.counters, not_before=view.not_before)
    return Decision(Action.LAUNCH, counters=view.counters)


def _decide_alive(view: JobView, attempt: Alive) -> Decision:
    """Decide for a job whose attempt has not ended: stop the attempt by SIGTERM, kill it, or do nothing."""
    if attempt.signalled_seconds is not None:
        if attempt.signalled_seconds >= attempt.killable_after:
            return Decision(Action.KILL, cause=attempt.signal_cause, counters=view.counters)
        return Decision(Action.NOTHING, counters=view.counters)
    if attempt.other_protocol and not (attempt.unmanaged and view.desired is Desired.RUN):
        # The service cannot read its agent's reports, so only a signal reaches it, on which it saves and ends. One that has not
        # begun is killed without a wait: it may not be able to read this service's files either.
        cause = Cause.UPGRADE if view.desired is Desired.RUN else view.desired_cause or _REQUEST_CAUSES[view.desired]
        return Decision(Action.STOP if attempt.seen else Action.KILL, cause=cause, counters=view.counters)
    if attempt.waiting and not attempt.seen and view.desired is not Desired.RUN:
        return Decision(Action.KILL, cause=view.desired_cause or _REQUEST_CAUSES[view.desired], counters=view.counters)
    if not attempt.seen and attempt.age >= attempt.launch_deadline:
        return Decision(Action.KILL, cause=Cause.LAUNCHER_ERROR, counters=view.counters)
    if view.desired is not Desired.RUN:
        # The agent may have received the request this late, and its ranks have their full grace from then on.
        if attempt.stop_requested_seconds >= view.limits.stop_grace + max_control_delay(view.limits.stop_grace):
            cause = Cause.API_CANCEL if view.desired is Desired.CANCEL else Cause.HANG
            return Decision(Action.STOP, cause=cause, counters=view.counters)
        return Decision(Action.NOTHING, counters=view.counters)
    if view.limits.timeout is not None and view.running_seconds + attempt.running_seconds >= view.limits.timeout:
        return Decision(Action.STOP, cause=Cause.TIMEOUT, counters=view.counters)
    return Decision(Action.NOTHING, counters=view.counters)


_REQUEST_CAUSES: Final = {
    Desired.SUSPEND: Cause.API_SUSPEND,
    Desired.CANCEL: Cause.API_CANCEL,
    Desired.PREEMPT: Cause.API_PREEMPT,
}
_CLEAN_STOP_OUTCOMES: Final = (Outcome.SUCCEEDED, Outcome.PREEMPTED, Outcome.SUSPENDED, Outcome.CANCELLED)


def _decide_ended(view: JobView, end: AttemptEnd, now: datetime) -> Decision:
    """Decide for a job whose attempt has ended: the job ends, is suspended or is queued again."""
    # after a stop, code may follow a script's last step, so its end must have been clean
    if end.finished and (
        end.cause is Cause.COMPLETED or (end.cause.outcome in _CLEAN_STOP_OUTCOMES and not view.limits.is_script)
    ):
        return _end_decision(view, Event.END_SUCCEEDED, _default_treatment(Cause.COMPLETED), view.counters, None, None)
    cause = end.cause
    if cause is Cause.COMPLETED:
        if view.desired is Desired.RUN:
            return _end_decision(view, Event.END_SUCCEEDED, _default_treatment(cause), view.counters, None, None)
        cause = view.desired_cause or _REQUEST_CAUSES[view.desired]
    treated = treatment(cause, end, view.limits.exit_rules)
    displaced = view.desired_cause is Cause.HIGHER_PRIORITY
    counters = update_counters(view.counters, treated, end, displaced=displaced)
    if view.desired is Desired.CANCEL or cause is Cause.API_CANCEL:
        return _end_decision(
            view, Event.END_CANCELLED, treated, counters, *_reason_unless(treated, Outcome.CANCELLED, end)
        )
    if treated.budget is Budget.FATAL:
        timeout = view.limits.timeout if cause is Cause.TIMEOUT else None
        text = end.message if timeout is None else _timeout_text(view.job_id, timeout)
        if treated.rule is not None:
            return _end_decision(
                view, Event.END_FAILED, treated, counters, Reason.EXIT_CODE, _last_attempt_text(treated, end)
            )
        return _end_decision(view, Event.END_FAILED, treated, counters, cause, text)
    if view.desired is Desired.SUSPEND:
        return _end_decision(
            view, Event.END_SUSPENDED, treated, counters, *_reason_unless(treated, Outcome.SUSPENDED, end)
        )
    exhausted = _exhausted(view, treated, counters, end)
    if exhausted is not None:
        return exhausted
    return _requeue(view, treated, counters, end, now)


def update_counters(counters: Counters, treated: Treatment, end: AttemptEnd, *, displaced: bool = False) -> Counters:
    """Return the counters after an attempt that ended with ``end`` and counts as ``treated``. ``displaced``: it was stopped for
    another job."""
    displaced = displaced or treated.cause is Cause.UPGRADE
    left_queue = (
        displaced or not end.begun
    ) and treated.outcome is Outcome.PREEMPTED  # or taken out of its engine's queue
    # it ran, and only the script knows whether it made progress
    if end.unmanaged:
        counters = replace(counters, attempts_without_progress=0)
    # a requested pause, or an end that the job did not cause, neither continues the series nor breaks it
    elif treated.outcome is not Outcome.SUSPENDED and not left_queue:
        counters = replace(
            counters, attempts_without_progress=0 if end.made_progress else counters.attempts_without_progress + 1
        )
    if end.made_progress:
        counters = replace(counters, failures=0, attempts_without_progress=0)
    spaced = _needs_spacing(treated, end)
    advanced = end.made_progress or end.seconds >= MAX_BACKOFF
    counters = replace(counters, retries=(0 if advanced else counters.retries) + 1 if spaced else 0)
    if treated.budget is Budget.PREEMPTIONS:
        return replace(counters, preemptions=counters.preemptions + 1)
    if treated.budget in (Budget.FAILURES, Budget.FATAL):
        return replace(counters, failures=counters.failures + 1)
    return counters


def _exhausted(view: JobView, treated: Treatment, counters: Counters, end: AttemptEnd) -> Decision | None:
    """Return the decision that ends the job because a budget is used up, for example; None: the job may have another attempt.
    ``counters`` include this end."""
    limits, last = view.limits, _last_attempt_text(treated, end)
    if treated.budget is Budget.FAILURES and counters.failures > limits.max_failures:
        kind = "of a script without a Session" if end.unmanaged else "without progress"
        text = (
            f"{pluralize(counters.failures, 'failure')} {kind}, {limits.max_failures} allowed (policy.max_failures). "
        )
        text += f"{last} {_failed_saves_advice(view) if end.cause is Cause.CHECKPOINT_ERROR else _resume_advice(view)}"
        return _end_decision(view, Event.END_FAILED, treated, counters, Reason.MAX_FAILURES, text)
    if (
        treated.budget is Budget.PREEMPTIONS
        and limits.max_preemptions is not None
        and counters.preemptions > limits.max_preemptions
    ):
        text = (
            f"{pluralize(counters.preemptions, 'preemption')}, {limits.max_preemptions} allowed "
            f"(policy.max_preemptions). {last}"
        )
        text += f" `ratchet resume {view.job_id}` continues it, with counters reset to 0."
        return _end_decision(view, Event.END_FAILED, treated, counters, Reason.MAX_PREEMPTIONS, text)
    # a third attempt would end in the same way
    if treated.budget is Budget.FAILURES and _fails_at_start(end):
        text = (
            "Two attempts in a row ended with the same error at the same line before their first step: it is not tried again. "
            f"{last} {_resume_advice(view)}"
        )
        return _end_decision(view, Event.END_FAILED, treated, counters, Reason.SAME_ERROR, text)
    if treated.outcome is not Outcome.SUSPENDED and counters.attempts_without_progress >= _no_progress_limit(
        view, treated
    ):
        row = pluralize(counters.attempts_without_progress, "attempt")
        text = f"{row} in a row committed no new step. {last} {_no_progress_advice(view, end)}"
        return _end_decision(view, Event.END_FAILED, treated, counters, Reason.NO_PROGRESS, text)
    return None


def _fails_at_start(end: AttemptEnd) -> bool:
    """True if the attempt repeated the error of the previous one before the failed rank finished a new step. A script without a
    Session reports no steps. For such a script: True if it repeated the error within ``MAX_BACKOFF`` seconds."""
    if end.repeated_error is None:
        return False
    return end.seconds < MAX_BACKOFF if end.unmanaged else end.repeated_error <= (end.base_step or 0)


def _resume_advice(view: JobView) -> str:
    """Return the sentence that says how to resume the job once its error is fixed."""
    resume = f"Fix its cause; then `ratchet resume {view.job_id}`"
    return (
        f"{resume}, which runs the same code again, or with changed code `--code DIR`."
        if view.limits.can_change_code
        else f"{resume}."
    )


def _failed_saves_advice(view: JobView) -> str:
    """Return the sentence that says what to do about failed saves."""
    return (
        "Its saves failed: follow the advice of the last failure (its checkpoint-failed events list all failures); then "
        f"`ratchet resume {view.job_id}`."
    )


def _no_progress_limit(view: JobView, treated: Treatment) -> int:
    """Return after how many attempts in a row without progress the job ends."""
    outside = treated.cause in EXTERNAL_CAUSES or treated.outcome is Outcome.LOST
    return max(NO_PROGRESS_LIMIT, view.limits.max_failures) if outside else NO_PROGRESS_LIMIT


def _no_progress_advice(view: JobView, end: AttemptEnd) -> str:
    """Return advice for the user of a job whose attempts commit no new step, by how the last one ended."""
    job_id = view.job_id
    if end.cause is Cause.CHECKPOINT_ERROR:
        return _failed_saves_advice(view)
    if end.repeated_error is not None:
        return f"The previous attempt ended with the same error at the same line and step. {_resume_advice(view)}"
    if end.unsaved_steps:
        other = (
            f"`ratchet fork {job_id} --set"
            if end.base_step
            else "submit it again (it has no checkpoint to fork) with `--set"
        )
        return (
            f"It did {pluralize(end.unsaved_steps, 'new step')}, and was ended before one was saved. If it has "
            f"checkpoint-failed events, follow their advice, "
            f"then `ratchet resume {job_id}`. Else save more often, or give it more "
            f"notice: {other} checkpoint.every_steps=N` (or checkpoint.every_seconds, policy.stop_grace)."
        )
    return f"It finished no new step: read its logs. {_resume_advice(view)}"


def _requeue(view: JobView, treated: Treatment, counters: Counters, end: AttemptEnd, now: datetime) -> Decision:
    """Return the decision that queues the job again, at once or after a back-off."""
    delay = _delay(view, treated, counters, end)
    if delay <= 0.0:
        once = " Tried again at once." if treated.budget is Budget.FAILURES else ""
        return _end_decision(
            view, Event.END_REQUEUE, treated, counters, treated.cause, _last_attempt_text(treated, end) + once
        )
    text = f"{_last_attempt_text(treated, end)} Tried again after {delay:.1f} s."
    return replace(
        _end_decision(view, Event.END_REQUEUE, treated, counters, Reason.BACKOFF, text),
        not_before=now + timedelta(seconds=delay),
    )


def _delay(view: JobView, treated: Treatment, counters: Counters, end: AttemptEnd) -> float:
    """Return the seconds until the next attempt may start; 0 or less: at once."""
    first = view.limits.backoff * (LOST_FACTOR if treated.outcome is Outcome.LOST else 1.0)
    if treated.budget is Budget.FAILURES:
        nth = counters.failures - (treated.cause in RETRIED_AT_ONCE)
        return backoff_seconds(view.job_id, view.attempt_number, nth, first) if nth else 0.0
    if _needs_spacing(treated, end):
        return backoff_seconds(view.job_id, view.attempt_number, counters.retries, first) - end.seconds
    # such a script may send the signal itself; one that ran for longer does not wait
    if end.unmanaged and (treated.cause is Cause.SIGTERM or treated.rule is not None):
        return backoff_seconds(view.job_id, view.attempt_number, counters.preemptions, first) - end.seconds
    return 0.0


def _needs_spacing(treated: Treatment, end: AttemptEnd) -> bool:
    """True if the end counts against no budget and may recur at once, so that the next attempt may have to wait."""
    # such as by an interpreter that was not upgraded with the service
    refused = treated.cause is Cause.UPGRADE and end.base_step is None
    return treated.budget is Budget.NONE and (treated.rule is not None or refused)


def _end_decision(
    view: JobView, event: Event, treated: Treatment, counters: Counters, reason: JobReason | None, message: str | None
) -> Decision:
    """Return the decision that ends the attempt and applies ``event`` to the job. ``reason`` and ``message`` are the job's."""
    return Decision(Action.END, event, treated.cause, counters, None, reason, message, treated.outcome, treated.rule)


def _default_treatment(cause: Cause) -> Treatment:
    """Return what an attempt's end with ``cause`` counts as if no rule of ``policy.exit_codes`` applies."""
    return Treatment(cause, cause.outcome, cause.budget)


def _reason_unless(treated: Treatment, outcome: Outcome, end: AttemptEnd) -> tuple[JobReason | None, str | None]:
    """Return the job's reason and message: (None, None) if the attempt ended with ``outcome``, as requested; otherwise the
    attempt's cause."""
    return (None, None) if treated.outcome is outcome else (treated.cause, _last_attempt_text(treated, end))


def _last_attempt_text(treated: Treatment, end: AttemptEnd) -> str:
    """Return a sentence with the cause and message of the attempt's end."""
    by = f" ({treated.rule})" if treated.rule is not None else ""
    return f"The last attempt ended with {treated.cause.value}{by}" + (
        f": {end.message.rstrip('.')}." if end.message else "."
    )


def _timeout_text(job_id: str, timeout: float) -> str:
    """Return the message of a job that has used up ``policy.timeout`` (seconds)."""
    return (
        f"The attempts ran for {timeout:g} s in all, which is policy.timeout. The last checkpoint is kept: "
        f"`ratchet resume {job_id}` continues from it for the same time "
        f"again, `ratchet fork {job_id} --set policy.timeout=SECONDS` "
        "for longer."
    )
