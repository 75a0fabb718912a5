"""What exit codes of the job's own code mean: the spec's rules, and what becomes of a job by them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from ratchet_contract.errors import SpecError
from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE, RESERVED, own_code
from ratchet_contract.phases import Cause, Desired, Event, JobPhase, Outcome
from ratchet_contract.spec_parse import parse_spec
from ratchet_contract.spec_policy import ExitRule
from ratchet_service.decide import MAX_BACKOFF, NO_PROGRESS_LIMIT, decide
from ratchet_service.decision import AttemptEnd, Counters, Decision, JobView, Limits

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RULES = tuple(
    ExitRule.model_validate(rule)
    for rule in (
        {"codes": [42, "10-19"], "action": "retry"},
        {"codes": [3], "action": "fail"},
        {"codes": ["200-255"], "action": "preempted"},
    )
)


def end(code: int | None, cause: Cause = Cause.EXCEPTION, desired: Desired = Desired.RUN, **more: Any) -> Decision:
    counters = more.pop("counters", Counters(preemptions=1, failures=1, no_progress=1))
    limits = Limits(exit_rules=RULES, **more.pop("limits", {}))
    attempt = AttemptEnd(cause, exit_code=code, message="why", **{"base_step": 10, "committed_step": 20, **more})
    phase = JobPhase.RUNNING if desired is Desired.RUN else JobPhase.STOPPING
    return decide(JobView("job-1", phase, desired, epoch=3, counters=counters, limits=limits, attempt=attempt), NOW)


@pytest.mark.parametrize(
    ("code", "event", "outcome", "counted", "rule"),
    [
        (42, Event.END_REQUEUE, Outcome.FAILED, Counters(1, 0, 0, 1), "exit code 42: retry, by policy.exit_codes[0]"),
        (10, Event.END_REQUEUE, Outcome.FAILED, Counters(1, 0, 0, 1), "exit code 10: retry, by policy.exit_codes[0]"),
        (19, Event.END_REQUEUE, Outcome.FAILED, Counters(1, 0, 0, 1), "exit code 19: retry, by policy.exit_codes[0]"),
        (20, Event.END_REQUEUE, Outcome.FAILED, Counters(1, 1, 0), None),
        (3, Event.END_FAILED, Outcome.FAILED, Counters(1, 1, 0), "exit code 3: fail, by policy.exit_codes[1]"),
        (
            200,
            Event.END_REQUEUE,
            Outcome.PREEMPTED,
            Counters(2, 0, 0),
            "exit code 200: preempted, by policy.exit_codes[2]",
        ),
        (1, Event.END_REQUEUE, Outcome.FAILED, Counters(1, 1, 0), None),
        (-9, Event.END_REQUEUE, Outcome.FAILED, Counters(1, 1, 0), None),
        (None, Event.END_REQUEUE, Outcome.FAILED, Counters(1, 1, 0), None),
    ],
)
def test_a_code_counts_as_its_rule_says(
    code: int | None, event: Event, outcome: Outcome, counted: Counters, rule: str | None
) -> None:
    decision = end(code)
    assert (decision.event, decision.outcome, decision.counters, decision.rule) == (event, outcome, counted, rule)
    assert decision.cause is Cause.EXCEPTION
    assert rule is None or rule in (decision.message or "")


def test_a_code_that_fails_ends_the_job_with_a_reason_of_its_own() -> None:
    decision = end(3, counters=Counters())
    assert (decision.event, decision.reason) == (Event.END_FAILED, "exit-code")
    assert decision.message is not None and "policy.exit_codes[1]" in decision.message and "why" in decision.message


@pytest.mark.parametrize("cause", [c for c in Cause if c is not Cause.EXCEPTION])
@pytest.mark.parametrize("code", [42, 3, 200])
def test_rules_are_for_what_the_jobs_own_code_did(cause: Cause, code: int) -> None:
    """A killed rank, a hang, a user error have a cause of their own, whatever number the process left."""
    assert end(code, cause).rule is None
    assert end(code, cause) == end(None, cause)


@pytest.mark.parametrize(
    ("desired", "event"), [(Desired.CANCEL, Event.END_CANCELLED), (Desired.SUSPEND, Event.END_SUSPENDED)]
)
def test_what_was_wanted_is_reached_all_the_same(desired: Desired, event: Event) -> None:
    assert end(42, desired=desired).event is event
    assert end(3, desired=Desired.CANCEL).event is Event.END_CANCELLED


@pytest.mark.parametrize("code", [42, 200])
def test_retries_that_cost_nothing_still_end_where_nothing_is_done(code: int) -> None:
    counters, events = Counters(), []
    for _ in range(NO_PROGRESS_LIMIT):
        decision = end(code, counters=counters, committed_step=None)
        counters, events = decision.counters, [*events, decision.event]
    assert events == [Event.END_REQUEUE, Event.END_REQUEUE, Event.END_FAILED] and decision.reason == "no-progress"
    assert counters.failures == 0


def test_retries_of_a_script_without_a_session_are_spaced() -> None:
    """It is never without progress: nothing else keeps one that ends at once from a tight loop."""
    quick = end(42, committed_step=None, unmanaged=True, limits={"backoff": 60.0}, seconds=1.0)
    assert quick.not_before is not None and 46 <= (quick.not_before - NOW).total_seconds() <= 72
    assert end(42, committed_step=None, unmanaged=True, limits={"backoff": 60.0}, seconds=100.0).not_before is None


def test_the_more_often_it_is_retried_the_longer_it_waits() -> None:
    """A script that ends at once, each time: as failures do, up to the longest back-off. One that ran for longer begins anew."""
    counters, waits = Counters(), []
    for _ in range(12):
        decision = end(42, counters=counters, committed_step=None, unmanaged=True, seconds=0.5, limits={"backoff": 1.0})
        counters = decision.counters
        waits.append(0.0 if decision.not_before is None else (decision.not_before - NOW).total_seconds() + 0.5)
    assert [round(wait / waits[0]) for wait in waits[:8]] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert waits[-1] == pytest.approx(MAX_BACKOFF) and counters.failures == 0
    long = end(42, counters=counters, committed_step=None, unmanaged=True, seconds=MAX_BACKOFF)
    assert (long.counters.retries, long.not_before) == (1, None)
    assert end(1, counters=counters, committed_step=None, unmanaged=True).counters.retries == 0
    assert end(42, counters=counters, committed_step=20).counters.retries == 1, "a new step is progress"


def test_preemptions_by_code_are_limited_like_others() -> None:
    decision = end(200, counters=Counters(preemptions=5), limits={"max_preemptions": 5})
    assert (decision.event, decision.reason) == (Event.END_FAILED, "max-preemptions")


def test_attempts_that_get_on_and_save_nothing_are_told_from_those_that_do_not_get_on() -> None:
    stuck = end(None, counters=Counters(no_progress=2), committed_step=None, last_step=10, limits={"max_failures": 9})
    moving = end(None, counters=Counters(no_progress=2), committed_step=None, last_step=17, limits={"max_failures": 9})
    assert stuck.reason == moving.reason == "no-progress"
    assert "finished no new step: read its logs" in (stuck.message or "")
    assert "did 7 new steps" in (moving.message or "") and "`ratchet fork job-1 --set" in (moving.message or "")
    assert "`ratchet resume job-1`" in (stuck.message or "") and "`ratchet resume job-1`" in (moving.message or "")
    first = end(None, counters=Counters(no_progress=2), base_step=None, committed_step=None, last_step=7)
    assert "submit it again (it has no checkpoint to fork) with `--set checkpoint.every_steps=N`" in (
        first.message or ""
    )


# --- the spec ----------------------------------------------------------------------------------------------------------


def policy(*rules: Any) -> Any:
    return parse_spec({"name": "t", "task": {"entrypoint": "a:B"}, "policy": {"exit_codes": list(rules)}}).policy


@pytest.mark.parametrize(
    ("rules", "pointer", "code", "says"),
    [
        ([{"codes": [78], "action": "retry"}], "/0/codes/0", "exit-code-reserved", "never retried"),
        ([{"codes": ["70-80"], "action": "fail"}], "/0/codes/0", "exit-code-reserved", "74 has a meaning"),
        ([{"codes": [1], "action": "fail"}], "/0/codes/0", "exit-code-reserved", "any uncaught exception"),
        ([{"codes": [256], "action": "fail"}], "/0/codes/0", "exit-code-reserved", "from 0 to 255"),
        ([{"codes": [-9], "action": "fail"}], "/0/codes/0", "exit-code-reserved", "from 0 to 255"),
        ([{"codes": [42, 42], "action": "fail"}], "/0/codes/1", "exit-code-twice", "named by"),
        (
            [{"codes": [42], "action": "fail"}, {"codes": ["40-49"], "action": "retry"}],
            "/1/codes/0", "exit-code-twice", "/policy/exit_codes/0/codes/0",
        ),
        ([{"codes": ["19-10"], "action": "fail"}], "/0/codes/0", "value-error", "the smaller one first"),
        ([{"codes": [True], "action": "fail"}], "/0/codes/0", "value-error", "not True"),
        ([{"codes": ["1_0"], "action": "fail"}], "/0/codes/0", "value-error", "written '10-19'"),
        ([{"codes": [], "action": "fail"}], "/0/codes", "too-short", "at least 1"),
        ([{"codes": [42], "action": "ignore"}], "/0/action", "literal-error", "'retry', 'fail' or 'preempted'"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_honoured_are_refused(rules: Any, pointer: str, code: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        policy(*rules)
    problem = caught.value.errors[0]
    assert (problem.pointer, problem.code) == (f"/policy/exit_codes{pointer}", code) and says in problem.detail


def test_no_code_that_ratchet_uses_is_a_scripts_own() -> None:
    assert RESERVED.keys() >= CAUSE_OF_EXIT_CODE.keys()
    assert [own_code(code) for code in (2, 255, *RESERVED, 256, -1, True, "2", None)] == [
        2,
        255,
        *[None] * (len(RESERVED) + 5),
    ]
    assert policy({"codes": [2, "3-4"], "action": "retry"}).exit_codes[0].has(4)
