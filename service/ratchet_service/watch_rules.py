"""What a look at one attempt leads to: pure but for the ``Watch``, which is the reconciler's own memory. ``watching`` does it.

An engine that is asked, a row that is written: neither is here, so that a simulation may walk through the very same rules.
``now`` is this process's monotonic clock's, as the times of the ``Watch`` are; ``wall`` is for what ``decide`` says of retries.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from typing import Final, NamedTuple

from ratchet_contract.phases import Cause, Desired
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.decide import decide
from ratchet_service.decision import Action, Alive
from ratchet_service.launchers.base import AttemptState
from ratchet_service.watched import Evidence, Timing, Watch, Wish, is_over

_UNPROVEN_SECONDS: Final = 10.0
_FIRST_PAUSE: Final = 0.5
LONGEST_PAUSE: Final = 30.0
"""Seconds between two looks at an attempt that cannot be looked after: from the first pause on doubled."""


class Do(StrEnum):
    WAIT = "wait"
    SUBMIT = "submit"  # no agent is there, and this process has submitted none
    STOP = "stop"  # SIGTERM, with ``cause``
    SIGNAL = "signal"  # the SIGTERM of a STOP that may not have come to the agent, again
    KILL = "kill"  # with ``cause``
    KILL_LOST = "kill-lost"  # the others of an agent that died without a word, with ``cause``
    KILL_LINGERING = "kill-lingering"  # who did not end when the others did: the cause is what their results tell
    FINISH = "finish"  # prove it dead, and settle
    LEAVE = "leave"  # nothing is done to a script of another protocol: tell so, once


class Deed(NamedTuple):
    """``text``: why, for stops, and kinds of kill that know it without the agents' logs."""

    do: Do
    cause: Cause | None = None
    text: str = ""


_WAIT: Final = Deed(Do.WAIT)
_FINISH: Final = Deed(Do.FINISH)


def looked(watch: Watch, now: float, timing: Timing) -> None:
    """The engine has just answered."""
    if now - watch.looked_at > timing.launch_deadline / 2:
        watch.waited_until = now  # service or engine was away: it may have left the queue just now
    watch.looked_at = now


def deed(watch: Watch, state: AttemptState, wish: Wish, now: float, wall: datetime, timing: Timing) -> Deed:
    """The next deed, from what the engine says (``state``) and what is wanted (``wish``)."""
    if wish.desired is Desired.RUN:
        watch.wished_since = None
    elif watch.wished_since is None or watch.wish_of != wish.which:
        watch.wished_since, watch.wish_of = now, wish.which
    if watch.killing:
        return _FINISH
    if state.alive:
        return _alive(watch, state, wish, now, wall, timing)
    if not state.seen and not watch.submitted:
        if wish.desired is Desired.RUN and not watch.other_protocol:
            return Deed(Do.SUBMIT) if watch.submit_at is None or now >= watch.submit_at else _WAIT
        watch.forced, watch.message = wish.desired_cause or Cause.UPGRADE, "ended before an agent was started"
    return _FINISH


def _alive(watch: Watch, state: AttemptState, wish: Wish, now: float, wall: datetime, timing: Timing) -> Deed:
    if is_over(state):
        watch.result_seen_at = now if watch.result_seen_at is None else watch.result_seen_at
        if now - watch.result_seen_at < timing.linger:
            return _WAIT
        text = f"agents that had not ended {timing.linger:g} s after another's end were killed"
        return Deed(Do.KILL_LINGERING, None, text)
    if state.lost:  # the others mostly see their connections break, and end by themselves
        watch.lost_since = now if watch.lost_since is None else watch.lost_since
        if now - watch.lost_since >= timing.lost:
            return _end_lost(state)
    if watch.stopped_at is not None and watch.unsent:  # before it is killed for not having ended
        return Deed(Do.SIGNAL)
    alive = Alive(
        age=now - watch.waited_until if not state.seen else 0.0,
        running=ran(watch, now) or 0.0,
        wished=0.0 if watch.wished_since is None else now - watch.wished_since,
        seen=state.seen,
        waiting=state.waiting is not None,
        asked=None if watch.stopped_at is None else now - watch.stopped_at,
        asked_cause=watch.forced,
        killable_after=watch.killable_after(timing),
        launch_deadline=timing.launch_deadline,
        other_protocol=watch.other_protocol,
        unmanaged=watch.unmanaged,
    )
    view = replace(
        watch.view,
        phase=wish.phase,
        desired=wish.desired,
        desired_cause=wish.desired_cause,
        attempt=alive,
    )
    decision = decide(view, wall)
    text = ""
    if decision.cause is Cause.UPGRADE and watch.stopped_at is None:
        text = f"its agent speaks protocol {watch.protocol}, this service {PROTOCOL_VERSION}: "
        text += "SIGTERM, on which it saves and ends" if state.seen else "ended before it had begun"
    if decision.action is Action.STOP:
        return Deed(Do.STOP, decision.cause, text)
    if decision.action is Action.KILL:
        return Deed(Do.KILL, decision.cause, text)
    return Deed(Do.LEAVE) if watch.other_protocol and watch.unmanaged and not watch.left else _WAIT


def _end_lost(state: AttemptState) -> Deed:
    end = next((end for end in state.ends if end.node is None or end.node in state.lost), None)
    text = f"the agent of node {', '.join(map(str, state.lost))} died without a result"
    if end is None:
        return Deed(Do.KILL_LOST, Cause.UNKNOWN, text)
    return Deed(Do.KILL_LOST, end.cause, f"{text} ({end.message})")


def stopping(watch: Watch, what: Deed, now: float) -> None:
    """The SIGTERM is on the job's history: it is sent, however often the engine has to be asked."""
    watch.stopped_at, watch.forced, watch.unsent = now, what.cause, True


def signalled(watch: Watch, now: float) -> None:
    """The engine has taken the SIGTERM: from here on the agent's time runs."""
    watch.stopped_at, watch.unsent = now, False


def killing(watch: Watch, what: Deed, text: str) -> None:
    """The kill is on the job's history. ``text``: what the attempt's end tells."""
    watch.killing = True
    if what.do is not Do.KILL_LINGERING:
        watch.forced, watch.message = what.cause, text


def tells_unproven(watch: Watch, now: float) -> bool:
    """What is killed and does not go is told of once, after a while."""
    if watch.unproven or watch.ending_since is None:
        return False
    watch.unproven = now - watch.ending_since > _UNPROVEN_SECONDS
    return watch.unproven


def failed(watch: Watch, now: float) -> None:
    """A look at it raised: the next one comes after a pause, and the others are looked at meanwhile."""
    watch.paused_until = now + min(_FIRST_PAUSE * 2.0 ** min(watch.failures, 16), LONGEST_PAUSE)
    watch.failures += 1


def ran(watch: Watch, now: float) -> float | None:
    """Seconds that the attempt has run; None: no agent of it has begun."""
    return None if watch.running_since is None else now - watch.running_since


def evidence(watch: Watch, last: AttemptState, logs: str, now: float) -> Evidence:
    """``last``: the look after the proof of death. What the engine said first stands: what it says behind a kill, which the proof
    of death is, too, may be of the kill itself."""
    ends = watch.ends if watch.killing else watch.ends or last.ends
    return Evidence(replace(last, ends=ends), watch.forced, watch.message, watch.killing, logs, ran(watch, now))
