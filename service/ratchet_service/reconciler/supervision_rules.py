"""Decides what follows from a poll of one attempt. Only the ``Watch`` changes here; ``supervise`` carries out the actions.
``now`` is monotonic."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from ratchet_contract.phases import Cause, Desired
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.launchers.base import AttemptState
from ratchet_service.lifecycle.attempt_result import Evidence
from ratchet_service.lifecycle.decide import decide
from ratchet_service.lifecycle.decision import Action, Alive
from ratchet_service.reconciler.attempt_watch import DesiredState, Timing, Watch, is_over

_UNPROVEN_SECONDS: Final = 10.0
_FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
"""Most seconds between two polls of an attempt that cannot be supervised; the pause doubles from ``_FIRST_PAUSE`` on."""


class ActionKind(StrEnum):
    """What the reconciler does with an attempt after a poll."""

    WAIT = "wait"
    SUBMIT = "submit"  # no agent exists, and this process has submitted none
    STOP = "stop"  # SIGTERM, with ``cause``
    SIGNAL = "signal"  # the SIGTERM of a STOP again, which may not have reached the agent
    KILL = "kill"  # with ``cause``
    KILL_LOST = "kill-lost"  # the other agents after one died without a result, with ``cause``
    KILL_LINGERING = "kill-lingering"  # agents that did not end when the others did; the results have the cause
    FINISH = "finish"  # prove the attempt dead, and finalise it
    LEAVE = "leave"  # leave a script of another protocol running, and record that once


class NextAction(NamedTuple):
    """What to do with the attempt. ``cause``: recorded with a stop or kill. ``text``: the reason; empty: the caller writes it."""

    kind: ActionKind
    cause: Cause | None = None
    text: str = ""


_WAIT: Final = NextAction(ActionKind.WAIT)
_FINISH: Final = NextAction(ActionKind.FINISH)


def record_poll(watch: Watch, now: float, timing: Timing) -> None:
    """Record in ``watch`` that the engine has answered a poll; after long without one, the launch deadline starts again."""
    if now - watch.polled_at > timing.launch_deadline / 2:
        watch.last_queued_at = now  # service or engine was down: the attempt may have left the queue just now
    watch.polled_at = now


def next_action(
    watch: Watch, state: AttemptState, desired_state: DesiredState, now: float, wall: datetime, timing: Timing
) -> NextAction:
    """Return the next action for the attempt, from what the launcher reports and the desired state. ``watch`` is updated."""
    if desired_state.desired is Desired.RUN:
        watch.stop_requested_since = None
    elif watch.stop_requested_since is None or watch.stop_request_id != desired_state.request_id:
        watch.stop_requested_since, watch.stop_request_id = now, desired_state.request_id
    if watch.killing:
        return _FINISH
    if state.alive:
        return _next_while_alive(watch, state, desired_state, now, wall, timing)
    if not state.seen and not watch.submitted:
        if desired_state.desired is Desired.RUN and not watch.other_protocol:
            return (
                NextAction(ActionKind.SUBMIT)
                if watch.submit_not_before is None or now >= watch.submit_not_before
                else _WAIT
            )
        watch.forced_cause, watch.message = (
            desired_state.desired_cause or Cause.UPGRADE,
            "ended before an agent was started",
        )
    return _FINISH


def _next_while_alive(
    watch: Watch, state: AttemptState, desired_state: DesiredState, now: float, wall: datetime, timing: Timing
) -> NextAction:
    """Return the next action for an attempt of which a part is alive or may still start. ``watch`` is updated."""
    if is_over(state):
        watch.result_seen_at = now if watch.result_seen_at is None else watch.result_seen_at
        if now - watch.result_seen_at < timing.linger:
            return _WAIT
        text = f"agents still running {timing.linger:g} s after another one ended were killed"
        return NextAction(ActionKind.KILL_LINGERING, None, text)
    if state.lost:  # the others usually see their connections break, and end without a signal
        watch.lost_since = now if watch.lost_since is None else watch.lost_since
        if now - watch.lost_since >= timing.lost:
            return _kill_lost(state)
    if watch.stopped_at is not None and watch.signal_unsent:  # before it is killed for not having ended
        return NextAction(ActionKind.SIGNAL)
    alive = Alive(
        age=now - watch.last_queued_at if not state.seen else 0.0,
        running_seconds=running_seconds(watch, now) or 0.0,
        stop_requested_seconds=0.0 if watch.stop_requested_since is None else now - watch.stop_requested_since,
        seen=state.seen,
        waiting=state.waiting is not None,
        signalled_seconds=None if watch.stopped_at is None else now - watch.stopped_at,
        signal_cause=watch.forced_cause,
        killable_after=watch.killable_after(timing),
        launch_deadline=timing.launch_deadline,
        other_protocol=watch.other_protocol,
        unmanaged=watch.unmanaged,
    )
    view = replace(
        watch.view,
        phase=desired_state.phase,
        desired=desired_state.desired,
        desired_cause=desired_state.desired_cause,
        attempt=alive,
    )
    decision = decide(view, wall)
    text = ""
    if decision.cause is Cause.UPGRADE and watch.stopped_at is None:
        text = f"its agent uses protocol {watch.protocol}, this service {PROTOCOL_VERSION}: "
        text += "SIGTERM, on which it saves and ends" if state.seen else "ended before it had begun"
    if decision.action is Action.STOP:
        return NextAction(ActionKind.STOP, decision.cause, text)
    if decision.action is Action.KILL:
        return NextAction(ActionKind.KILL, decision.cause, text)
    return (
        NextAction(ActionKind.LEAVE) if watch.other_protocol and watch.unmanaged and not watch.left_running else _WAIT
    )


def _kill_lost(state: AttemptState) -> NextAction:
    """Return the action that kills the remaining agents after one has died without a result. The action's cause is the one that
    the engine reports, or ``UNKNOWN`` if it reports none."""
    end = next((end for end in state.ends if end.node is None or end.node in state.lost), None)
    text = f"the agent of node {', '.join(map(str, state.lost))} died without a result"
    if end is None:
        return NextAction(ActionKind.KILL_LOST, Cause.UNKNOWN, text)
    return NextAction(ActionKind.KILL_LOST, end.cause, f"{text} ({end.message})")


def record_stop(watch: Watch, action: NextAction, now: float) -> None:
    """Record in ``watch`` a stop that was written to the job's history, with its cause. The SIGTERM counts as not sent yet."""
    watch.stopped_at, watch.forced_cause, watch.signal_unsent = now, action.cause, True


def record_signal(watch: Watch, now: float) -> None:
    """Record in ``watch`` that the SIGTERM need not be sent again; the agent's time runs from ``now``."""
    watch.stopped_at, watch.signal_unsent = now, False


def record_kill(watch: Watch, action: NextAction, text: str) -> None:
    """Record in ``watch`` a kill that was written to the job's history. Its cause, and ``text`` as message, are recorded, too,
    unless the kill only ends lingering agents."""
    watch.killing = True
    if action.kind is not ActionKind.KILL_LINGERING:
        watch.forced_cause, watch.message = action.cause, text


def should_report_unproven(watch: Watch, now: float) -> bool:
    """True once per watch, some time after the first kill. Call it only while parts of the attempt are alive."""
    if watch.unproven_reported or watch.ending_since is None:
        return False
    watch.unproven_reported = now - watch.ending_since > _UNPROVEN_SECONDS
    return watch.unproven_reported


def record_failure(watch: Watch, now: float) -> None:
    """Record in ``watch`` that a poll raised. The pause before the next poll doubles with each failure in a row, up to
    ``LONGEST_PAUSE``."""
    watch.paused_until = now + min(_FIRST_PAUSE * 2.0 ** min(watch.failures, 16), LONGEST_PAUSE)
    watch.failures += 1


def running_seconds(watch: Watch, now: float) -> float | None:
    """Return the seconds that the attempt has run since its first agent began; None: no agent of it has begun."""
    return None if watch.running_since is None else now - watch.running_since


def collect_evidence(watch: Watch, last: AttemptState, logs: str, now: float) -> Evidence:
    """Return the evidence of the attempt's end. ``last``: the poll after the attempt was proved dead. ``logs``: as in
    ``Evidence``."""
    # after a kill, a report in ``last`` may be about the kill itself
    ends = watch.engine_ends if watch.killing else watch.engine_ends or last.ends
    return Evidence(
        replace(last, ends=ends), watch.forced_cause, watch.message, watch.killing, logs, running_seconds(watch, now)
    )
