"""The transition table is total, and says what the design says."""

from __future__ import annotations

import itertools

import pytest

from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE
from ratchet_contract.phases import (
    CAUSE_PRECEDENCE,
    TRANSITIONS,
    Budget,
    Cause,
    Desired,
    Event,
    JobPhase,
    Outcome,
    next_step,
)

ENDS = (Event.END_SUCCEEDED, Event.END_SUSPENDED, Event.END_CANCELLED, Event.END_REQUEUE, Event.END_FAILED)
REFUSALS = {"wrong-phase", "job-ended", "not-running"}


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(JobPhase, Event)))
def test_every_transition_is_a_phase_or_a_named_refusal(phase: JobPhase, event: Event) -> None:
    for desired in Desired:
        cell = next_step(phase, event, desired)
        assert (cell.phase is None) == (cell.code in REFUSALS)


def test_transition_table_has_every_phase_and_event() -> None:
    assert set(TRANSITIONS) == set(JobPhase)
    assert all(set(row) == set(Event) for row in TRANSITIONS.values())


@pytest.mark.parametrize("phase", [p for p in JobPhase if p.terminal])
def test_only_resume_leaves_a_terminal_phase_and_never_success(phase: JobPhase) -> None:
    leaving = {e for e in Event if next_step(phase, e).phase not in (None, phase)}
    assert leaving == (set() if phase is JobPhase.SUCCEEDED else {Event.RESUME})
    if leaving:
        assert next_step(phase, Event.RESUME) == (JobPhase.QUEUED, Desired.RUN, "", True)


@pytest.mark.parametrize("phase", [p for p in JobPhase if p.active])
def test_active_phase_accepts_every_end_and_clears_stop_request(phase: JobPhase) -> None:
    reached = {next_step(phase, e).phase for e in ENDS}
    assert reached == {JobPhase.SUCCEEDED, JobPhase.SUSPENDED, JobPhase.CANCELLED, JobPhase.QUEUED, JobPhase.FAILED}
    assert {next_step(phase, e).desired for e in ENDS} == {Desired.RUN}


@pytest.mark.parametrize("phase", [p for p in JobPhase if not p.active and p is not JobPhase.QUEUED])
def test_inactive_phase_refuses_attempt_events(phase: JobPhase) -> None:
    assert all(next_step(phase, e).phase is None for e in (*ENDS, Event.TRAINING, Event.LAUNCH))


def test_stop_request_is_replaced_only_by_a_stronger_one() -> None:
    stopping = JobPhase.STOPPING
    assert next_step(stopping, Event.CANCEL, Desired.SUSPEND).desired is Desired.CANCEL
    assert next_step(stopping, Event.SUSPEND, Desired.PREEMPT).desired is Desired.SUSPEND
    assert next_step(stopping, Event.PREEMPT, Desired.SUSPEND).desired is None
    assert next_step(stopping, Event.RESUME, Desired.SUSPEND).desired is Desired.PREEMPT
    for event in (Event.SUSPEND, Event.RESUME, Event.PREEMPT):
        assert next_step(stopping, event, Desired.CANCEL).phase is None


def test_every_cause_has_outcome_budget_and_precedence() -> None:
    assert sorted(CAUSE_PRECEDENCE) == sorted(Cause)
    free = {Cause.COMPLETED, Cause.API_SUSPEND, Cause.API_CANCEL, Cause.UPGRADE}
    assert {c for c in Cause if c.budget is Budget.NONE} == free
    counted = {c for c in Cause if c.budget is Budget.PREEMPTIONS}
    assert {c for c in Cause if c.outcome is Outcome.PREEMPTED} == counted | {Cause.UPGRADE}
    assert CAUSE_PRECEDENCE[-1] is Cause.COMPLETED, "one rank's clean end never hides another's failure"


def test_reserved_exit_codes_map_to_causes() -> None:
    assert CAUSE_OF_EXIT_CODE[143] is Cause.SIGTERM
    assert CAUSE_OF_EXIT_CODE[78] is Cause.USER_ERROR
