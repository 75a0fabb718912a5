"""What follows from a poll of an attempt: stops, kills and ends at their deadlines, not before."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from ratchet_contract.phases import Cause, Desired, JobPhase
from ratchet_contract.protocol.messages import AttemptResult
from ratchet_contract.version import PROTOCOL_VERSION
from ratchet_service.launchers.base import AttemptState, EngineEnd, NodeState
from ratchet_service.lifecycle.decision import JobView, Limits
from ratchet_service.lifecycle.supervision import (
    ActionKind,
    DesiredState,
    NextAction,
    Supervised,
    Supervision,
    Timing,
    collect_evidence,
    is_unproven,
    next_action,
    record_ending,
    record_kill,
    record_poll,
    record_signal,
    record_stop,
    running_seconds,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TIMING = Timing(launch_deadline=60.0, kill_after=10.0, linger=20.0, lost=5.0)
SUSPEND_AT = datetime(2026, 1, 1, 1, tzinfo=UTC)


def supervised(protocol: int = PROTOCOL_VERSION, unmanaged: bool = False, **limits: Any) -> Supervised:
    view = JobView("job-1", JobPhase.RUNNING, attempt_number=1, limits=Limits(**limits))
    return Supervised(view, protocol, unmanaged)


def alive(*nodes: NodeState, **more: Any) -> AttemptState:
    return AttemptState(True, nodes or (NodeState(seen=True),), **more)


def desired(what: Desired = Desired.RUN) -> DesiredState:
    ends = what is not Desired.RUN
    return DesiredState(JobPhase.RUNNING, what, Cause.API_SUSPEND if ends else None, SUSPEND_AT if ends else None)


def after(
    known: Supervision,
    state: AttemptState,
    at: float,
    *,
    one: Supervised | None = None,
    wanted: DesiredState | None = None,
) -> tuple[Supervision, NextAction]:
    """The poll at ``at`` seconds."""
    return next_action(one or supervised(), known, state, wanted or desired(), at, NOW, TIMING)


def begun(at: float = 0.0, **known: Any) -> Supervision:
    return Supervision(at, at, at, submitted=True, **known)


def test_running_attempt_is_left_alone() -> None:
    known = begun(running_since=0.0)
    assert after(known, alive(), 1e6) == (known, NextAction(ActionKind.WAIT))


def test_attempt_without_an_agent_is_killed_at_its_launch_deadline() -> None:
    state = alive(NodeState())
    assert after(begun(), state, 59.9)[1].kind is ActionKind.WAIT
    assert after(begun(), state, 60.0)[1] == NextAction(ActionKind.KILL, Cause.LAUNCHER_ERROR)


def test_launch_deadline_starts_again_after_a_long_time_without_a_poll() -> None:
    known = begun()
    assert record_poll(known, 30.0, TIMING).last_queued_at == 0.0
    assert record_poll(known, 31.0, TIMING).last_queued_at == 31.0


def test_attempt_that_was_not_submitted_is_submitted_when_the_engine_may_be_asked_again() -> None:
    known = Supervision(0.0, 0.0, 0.0, submit_not_before=2.0)
    gone = AttemptState(False)
    assert after(known, gone, 1.9)[1].kind is ActionKind.WAIT
    assert after(known, gone, 2.0)[1].kind is ActionKind.SUBMIT
    ended, action = after(known, gone, 2.0, wanted=desired(Desired.SUSPEND))
    assert action.kind is ActionKind.FINISH
    assert (ended.forced_cause, ended.message) == (Cause.API_SUSPEND, "ended before an agent was started")


def test_stop_request_is_enforced_by_sigterm_after_its_grace_and_by_sigkill_after_that() -> None:
    one, wanted = supervised(stop_grace=30.0), desired(Desired.SUSPEND)
    known, action = after(begun(running_since=0.0), alive(), 100.0, one=one, wanted=wanted)
    assert action.kind is ActionKind.WAIT and known.stop_requested_since == 100.0
    assert after(known, alive(), 129.0, one=one, wanted=wanted)[1].kind is ActionKind.WAIT
    known, action = after(known, alive(), 300.0, one=one, wanted=wanted)
    assert (action.kind, action.cause) == (ActionKind.STOP, Cause.HANG)
    known = record_stop(known, action, 300.0)
    assert after(known, alive(), 300.0, one=one, wanted=wanted)[1].kind is ActionKind.SIGNAL, "it was not sent yet"
    known = record_signal(known, 301.0)
    assert after(known, alive(), 310.9, one=one, wanted=wanted)[1].kind is ActionKind.WAIT
    assert after(known, alive(), 311.0, one=one, wanted=wanted)[1] == NextAction(ActionKind.KILL, Cause.HANG)


def test_another_stop_request_gets_its_own_grace() -> None:
    known, _ = after(begun(), alive(), 100.0, wanted=desired(Desired.SUSPEND))
    again = replace(desired(Desired.CANCEL), desired_at=datetime(2026, 1, 2, tzinfo=UTC))
    assert after(known, alive(), 200.0, wanted=again)[0].stop_requested_since == 200.0
    withdrawn, _ = after(known, alive(), 200.0)
    assert withdrawn.stop_requested_since is None


def test_other_agents_are_killed_some_time_after_one_died_without_a_result() -> None:
    end = (
        EngineEnd(Cause.NODE_LOST, "node removed", 1) if hasattr(Cause, "NODE_LOST") else EngineEnd(Cause.OOM, "oom", 1)
    )
    state = alive(NodeState(seen=True), NodeState(seen=True, gone=True), ends=(end,))
    known, action = after(begun(running_since=0.0), state, 100.0)
    assert action.kind is ActionKind.WAIT and known.lost_since == 100.0
    _, action = after(known, state, 105.0)
    assert (action.kind, action.cause) == (ActionKind.KILL_LOST, end.cause)
    assert action.text == f"the agent of node 1 died without a result ({end.message})"


def test_agents_that_linger_after_a_result_are_killed_without_a_cause_of_their_own() -> None:
    at = NOW.isoformat()
    result = AttemptResult(
        job_id="job-1", attempt=1, cause=Cause.EXCEPTION, last_step=3, ranks=[], started_at=at, ended_at=at
    )
    state = alive(NodeState(seen=True, gone=True, result=result), NodeState(seen=True))
    known, action = after(begun(running_since=0.0), state, 100.0)
    assert action.kind is ActionKind.WAIT
    known, action = after(known, state, 120.0)
    assert action.kind is ActionKind.KILL_LINGERING
    known = record_kill(known, action, action.text)
    assert known.killing and known.forced_cause is None and known.message is None
    assert after(known, state, 121.0)[1].kind is ActionKind.FINISH


@pytest.mark.parametrize("unmanaged", [False, True])
def test_agent_of_another_protocol_is_stopped_unless_only_its_end_would_be_lost(unmanaged: bool) -> None:
    one = supervised(PROTOCOL_VERSION + 1, unmanaged)
    known, action = after(begun(), alive(), 1.0, one=one)
    assert action.kind is (ActionKind.LEAVE if unmanaged else ActionKind.STOP)
    left = replace(known, left_running=True)
    assert not unmanaged or after(left, alive(), 2.0, one=one)[1].kind is ActionKind.WAIT


def test_reports_about_the_kill_itself_are_no_evidence() -> None:
    before, about_kill = EngineEnd(Cause.OOM, "out of memory"), EngineEnd(Cause.RANK_KILLED, "killed")
    killed = replace(begun(running_since=10.0), killing=True, forced_cause=Cause.HANG)
    first = record_ending(killed, alive(ends=(before,)), 100.0)
    second = record_ending(first, alive(ends=(about_kill,)), 101.0)
    assert second.ending_since == 100.0
    evidence = collect_evidence(second, AttemptState(False, ends=(about_kill,)), "", 102.0)
    assert evidence.state.ends == (before,) and evidence.forced_cause is Cause.HANG
    assert running_seconds(second, 102.0) == 92.0
    assert not is_unproven(second, 110.0) and is_unproven(second, 110.1)
    assert not is_unproven(replace(second, unproven_reported=True), 200.0)
