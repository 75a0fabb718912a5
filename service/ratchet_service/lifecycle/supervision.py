"""Decides what the reconciler does with an attempt after a poll of it. Pure: what is known of the attempt comes in as a value and
is returned changed; ``reconciler.supervise`` carries out the actions. Times are seconds of the caller's monotonic clock, but for
``wall``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from ratchet_contract.phases import Cause, Desired, JobPhase
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.launchers.base import AttemptState, EngineEnd
from ratchet_service.lifecycle.attempt_result import Evidence
from ratchet_service.lifecycle.decide import decide
from ratchet_service.lifecycle.decision import Action, Alive, JobView

_UNPROVEN_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Timing:
    """Time limits in seconds. ``launch_deadline``: for the first agent to begin. ``kill_after``: the least time from SIGTERM to
    SIGKILL. ``linger``: for all agents to end, once ``is_over`` is true. ``lost``: from the death of one agent without a result
    until the others are killed."""

    launch_deadline: float = 60.0
    kill_after: float = 10.0
    linger: float = 20.0
    lost: float = 5.0


@dataclass(frozen=True)
class DesiredState:
    """The phase and the desired state in the job's row. ``desired_cause``: why an end is requested. ``desired_at``: since when an
    end has been requested. A request that replaces an earlier one does not change this time."""

    phase: JobPhase
    desired: Desired
    desired_cause: Cause | None
    desired_at: datetime | None

    @property
    def request_id(self) -> float | None:
        """An id of the request to end the attempt: ``desired_at`` in seconds since 1970; None: no end is requested. If a request
        is withdrawn and another is made, the id changes."""
        return None if self.desired_at is None else self.desired_at.timestamp()


@dataclass(frozen=True)
class Supervised:
    """What is read once, when the supervision of an attempt begins. ``view``: of its job; each poll replaces the phase and the
    desired state. ``protocol``: of its agents. ``unmanaged``: it is known to be a script without a Session."""

    view: JobView
    protocol: int = PROTOCOL_VERSION
    unmanaged: bool = False

    @property
    def other_protocol(self) -> bool:
        """True if the attempt's agents use another protocol version than this service."""
        return self.protocol != PROTOCOL_VERSION


@dataclass(frozen=True)
class Supervision:
    """What is known of an attempt under supervision. Each function below returns a new value."""

    created_at: float  # the attempt was created then, or earlier
    last_queued_at: float  # start of the launch deadline: it may have left the engine's queue then
    polled_at: float
    running_since: float | None = None  # so that the time since then is what the attempt has run
    left_running: bool = False  # the history records that it is left to run to its end
    submitted: bool = False  # by this process; after a takeover an attempt that has an agent is not submitted again
    submit_not_before: float | None = None  # the engine was unreachable or full
    stop_requested_since: float | None = None  # the first poll that saw the request to end it
    stop_request_id: float | None = None  # which request that is: ``DesiredState.request_id``
    stopped_at: float | None = None  # the SIGTERM was recorded, or sent if that is later
    signal_unsent: bool = False  # the SIGTERM is in the history, but the engine may not have accepted it
    forced_cause: Cause | None = None
    message: str | None = None
    killing: bool = False
    result_seen_at: float | None = None  # the first poll for which ``is_over`` was true
    lost_since: float | None = None
    ending_since: float | None = None
    engine_ends: tuple[EngineEnd, ...] = ()  # what the engine has reported since ``ending_since``
    unproven_reported: bool = False


class ActionKind(StrEnum):
    """What the reconciler does with an attempt after a poll."""

    WAIT = "wait"
    SUBMIT = "submit"  # no agent exists, and this process has submitted none
    STOP = "stop"  # SIGTERM, with ``cause``
    SIGNAL = "signal"  # the SIGTERM of a STOP again, which may not have reached the agent
    KILL = "kill"  # record that it is to be killed, with ``cause``; the FINISH of the next poll kills it
    KILL_LOST = "kill-lost"  # the other agents after one died without a result, with ``cause``
    KILL_LINGERING = "kill-lingering"  # agents that did not end when the others did; the results have the cause
    FINISH = "finish"  # kill what is alive, prove the attempt dead, and finalise it
    LEAVE = "leave"  # leave a script of another protocol running, and record that once


class NextAction(NamedTuple):
    """What to do with the attempt. ``cause``: recorded with a stop or kill. ``text``: the reason; empty: the caller writes it."""

    kind: ActionKind
    cause: Cause | None = None
    text: str = ""


_WAIT: Final = NextAction(ActionKind.WAIT)
_FINISH: Final = NextAction(ActionKind.FINISH)


def is_over(state: AttemptState) -> bool:
    """True if all agents have written a result, or one agent's result makes the others end, such as a failure."""
    results = state.results
    return len(results) == len(state.nodes) or any(
        not r.secondary and (r.cause.is_failure or not r.ranks) for r in results
    )


def killable_after(one: Supervised, known: Supervision, timing: Timing) -> float:
    """Return the least seconds from SIGTERM to SIGKILL of an agent. They include ``policy.stop_grace`` if the agents begin their
    last save only at the SIGTERM."""
    # these agents receive no stop request, and start their last save at the SIGTERM
    first = one.other_protocol or known.forced_cause is Cause.TIMEOUT
    return timing.kill_after + (one.view.limits.stop_grace if first else 0.0)


def record_poll(known: Supervision, now: float, timing: Timing) -> Supervision:
    """Record that the engine has answered a poll; after long without one, the launch deadline starts again."""
    # service or engine was down: the attempt may have left the queue just now
    again = now - known.polled_at > timing.launch_deadline / 2
    return replace(known, polled_at=now, last_queued_at=now if again else known.last_queued_at)


def next_action(
    one: Supervised,
    known: Supervision,
    state: AttemptState,
    desired_state: DesiredState,
    now: float,
    wall: datetime,
    timing: Timing,
) -> tuple[Supervision, NextAction]:
    """Return the next action for the attempt, from what the launcher reports and the desired state, and what is known now."""
    if desired_state.desired is Desired.RUN:
        known = replace(known, stop_requested_since=None)
    elif known.stop_requested_since is None or known.stop_request_id != desired_state.request_id:
        known = replace(known, stop_requested_since=now, stop_request_id=desired_state.request_id)
    if known.killing:
        return known, _FINISH
    if state.alive:
        return _next_while_alive(one, known, state, desired_state, now, wall, timing)
    if not state.seen and not known.submitted:
        if desired_state.desired is Desired.RUN and not one.other_protocol:
            due = known.submit_not_before is None or now >= known.submit_not_before
            return known, NextAction(ActionKind.SUBMIT) if due else _WAIT
        cause = desired_state.desired_cause or Cause.UPGRADE
        known = replace(known, forced_cause=cause, message="ended before an agent was started")
    return known, _FINISH


def _next_while_alive(
    one: Supervised,
    known: Supervision,
    state: AttemptState,
    desired_state: DesiredState,
    now: float,
    wall: datetime,
    timing: Timing,
) -> tuple[Supervision, NextAction]:
    """Return as ``next_action`` does, for an attempt of which a part is alive or may still start."""
    if is_over(state):
        seen_at = now if known.result_seen_at is None else known.result_seen_at
        known = replace(known, result_seen_at=seen_at)
        if now - seen_at < timing.linger:
            return known, _WAIT
        text = f"agents still running {timing.linger:g} s after another one ended were killed"
        return known, NextAction(ActionKind.KILL_LINGERING, None, text)
    if state.lost:  # the others usually see their connections break, and end without a signal
        lost_since = now if known.lost_since is None else known.lost_since
        known = replace(known, lost_since=lost_since)
        if now - lost_since >= timing.lost:
            return known, _kill_lost(state)
    if known.stopped_at is not None and known.signal_unsent:  # before it is killed for not having ended
        return known, NextAction(ActionKind.SIGNAL)
    alive = Alive(
        age=now - known.last_queued_at if not state.seen else 0.0,
        running_seconds=running_seconds(known, now) or 0.0,
        stop_requested_seconds=0.0 if known.stop_requested_since is None else now - known.stop_requested_since,
        seen=state.seen,
        waiting=state.waiting is not None,
        signalled_seconds=None if known.stopped_at is None else now - known.stopped_at,
        signal_cause=known.forced_cause,
        killable_after=killable_after(one, known, timing),
        launch_deadline=timing.launch_deadline,
        other_protocol=one.other_protocol,
        unmanaged=one.unmanaged,
    )
    view = replace(
        one.view,
        phase=desired_state.phase,
        desired=desired_state.desired,
        desired_cause=desired_state.desired_cause,
        attempt=alive,
    )
    decision = decide(view, wall)
    text = ""
    if decision.cause is Cause.UPGRADE and known.stopped_at is None:
        text = f"its agent uses protocol {one.protocol}, this service {PROTOCOL_VERSION}: "
        text += "SIGTERM, on which it saves and ends" if state.seen else "ended before it had begun"
    if decision.action is Action.STOP:
        return known, NextAction(ActionKind.STOP, decision.cause, text)
    if decision.action is Action.KILL:
        return known, NextAction(ActionKind.KILL, decision.cause, text)
    leaves = one.other_protocol and one.unmanaged and not known.left_running
    return known, NextAction(ActionKind.LEAVE) if leaves else _WAIT


def _kill_lost(state: AttemptState) -> NextAction:
    """Return the action that kills the remaining agents after one has died without a result. The action's cause is the one that
    the engine reports, or ``UNKNOWN`` if it reports none."""
    end = next((end for end in state.ends if end.node is None or end.node in state.lost), None)
    text = f"the agent of node {', '.join(map(str, state.lost))} died without a result"
    if end is None:
        return NextAction(ActionKind.KILL_LOST, Cause.UNKNOWN, text)
    return NextAction(ActionKind.KILL_LOST, end.cause, f"{text} ({end.message})")


def record_stop(known: Supervision, action: NextAction, now: float) -> Supervision:
    """Record a stop that was written to the job's history, with its cause. The SIGTERM counts as not sent yet."""
    return replace(known, stopped_at=now, forced_cause=action.cause, signal_unsent=True)


def record_signal(known: Supervision, now: float) -> Supervision:
    """Record that the SIGTERM need not be sent again; the agent's time runs from ``now``."""
    return replace(known, stopped_at=now, signal_unsent=False)


def record_kill(known: Supervision, action: NextAction, text: str) -> Supervision:
    """Record a kill that was written to the job's history. Its cause, and ``text`` as message, are recorded, too, unless the kill
    only ends lingering agents."""
    if action.kind is ActionKind.KILL_LINGERING:
        return replace(known, killing=True)
    return replace(known, killing=True, forced_cause=action.cause, message=text)


def record_ending(known: Supervision, state: AttemptState, now: float) -> Supervision:
    """Record that the attempt is being ended, and what the engine reported of its end, unless that may be about the kill."""
    if known.ending_since is None or not known.killing:
        known = replace(known, engine_ends=known.engine_ends or state.ends)
    return replace(known, ending_since=now if known.ending_since is None else known.ending_since)


def is_unproven(known: Supervision, now: float) -> bool:
    """True if parts of the attempt are alive for so long after the first kill that this is to be reported. Call it only while
    parts of the attempt are alive."""
    started = known.ending_since
    return not known.unproven_reported and started is not None and now - started > _UNPROVEN_SECONDS


def running_seconds(known: Supervision, now: float) -> float | None:
    """Return the seconds that the attempt has run since its first agent began; None: no agent of it has begun."""
    return None if known.running_since is None else now - known.running_since


def collect_evidence(known: Supervision, last: AttemptState, logs: str, now: float) -> Evidence:
    """Return the evidence of the attempt's end. ``last``: the poll after the attempt was proved dead. ``logs``: as in
    ``Evidence``."""
    # after a kill, a report in ``last`` may be about the kill itself
    ends = known.engine_ends if known.killing else known.engine_ends or last.ends
    return Evidence(
        replace(last, ends=ends), known.forced_cause, known.message, known.killing, logs, running_seconds(known, now)
    )
