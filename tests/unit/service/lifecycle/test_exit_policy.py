"""What exit codes of the job's own code mean: the spec's rules, and what becomes of a job by them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from ratchet_contract.errors import SpecError
from ratchet_contract.exit_codes import CAUSE_OF_EXIT_CODE, RESERVED, script_exit_code
from ratchet_contract.phases import Cause, Desired, Event, JobPhase, Outcome
from ratchet_contract.spec.parse import parse_spec
from ratchet_contract.spec.policy import ExitRule
from ratchet_service.lifecycle.decide import MAX_BACKOFF, NO_PROGRESS_LIMIT, decide
from ratchet_service.lifecycle.decision import AttemptEnd, Counters, Decision, JobView, Limits

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
    counters = more.pop("counters", Counters(preemptions=1, failures=1, attempts_without_progress=1))
    limits = Limits(exit_rules=RULES, **more.pop("limits", {}))
    attempt = AttemptEnd(cause, exit_code=code, message="why", **{"base_step": 10, "committed_step": 20, **more})
    phase = JobPhase.RUNNING if desired is Desired.RUN else JobPhase.STOPPING
    return decide(
        JobView("job-1", phase, desired, attempt_number=3, counters=counters, limits=limits, attempt=attempt), NOW
    )


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
def test_exit_code_rule_decides_outcome_and_counters(
    code: int | None, event: Event, outcome: Outcome, counted: Counters, rule: str | None
) -> None:
    decision = end(code)
    assert (decision.event, decision.outcome, decision.counters, decision.rule) == (event, outcome, counted, rule)
    assert decision.cause is Cause.EXCEPTION
    assert rule is None or rule in (decision.message or "")


def test_exit_code_with_fail_rule_ends_job_with_reason() -> None:
    decision = end(3, counters=Counters())
    assert (decision.event, decision.reason) == (Event.END_FAILED, "exit-code")
    assert decision.message is not None and "policy.exit_codes[1]" in decision.message and "why" in decision.message


@pytest.mark.parametrize("cause", [c for c in Cause if c is not Cause.EXCEPTION])
@pytest.mark.parametrize("code", [42, 3, 200])
def test_exit_code_rules_apply_only_to_exception_cause(cause: Cause, code: int) -> None:
    """A killed rank, a hang, a user error have a cause of their own, whatever number the process left."""
    assert end(code, cause).rule is None
    assert end(code, cause) == end(None, cause)


@pytest.mark.parametrize(
    ("desired", "event"), [(Desired.CANCEL, Event.END_CANCELLED), (Desired.SUSPEND, Event.END_SUSPENDED)]
)
def test_exit_code_rules_do_not_override_requested_stop(desired: Desired, event: Event) -> None:
    assert end(42, desired=desired).event is event
    assert end(3, desired=Desired.CANCEL).event is Event.END_CANCELLED


@pytest.mark.parametrize("code", [42, 200])
def test_exit_code_retries_end_after_no_progress_limit(code: int) -> None:
    counters, events = Counters(), []
    for _ in range(NO_PROGRESS_LIMIT):
        decision = end(code, counters=counters, committed_step=None)
        counters, events = decision.counters, [*events, decision.event]
    assert events == [Event.END_REQUEUE, Event.END_REQUEUE, Event.END_FAILED] and decision.reason == "no-progress"
    assert counters.failures == 0


def test_exit_code_retries_of_unmanaged_script_are_delayed() -> None:
    """It is never without progress: nothing else keeps one that ends at once from a tight loop."""
    quick = end(42, committed_step=None, unmanaged=True, limits={"backoff": 60.0}, seconds=1.0)
    assert quick.not_before is not None and 46 <= (quick.not_before - NOW).total_seconds() <= 72
    assert end(42, committed_step=None, unmanaged=True, limits={"backoff": 60.0}, seconds=100.0).not_before is None


def test_exit_code_retry_delay_grows_with_each_retry() -> None:
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


def test_exit_code_preemptions_count_against_max_preemptions() -> None:
    decision = end(200, counters=Counters(preemptions=5), limits={"max_preemptions": 5})
    assert (decision.event, decision.reason) == (Event.END_FAILED, "max-preemptions")


def test_no_progress_message_distinguishes_unsaved_from_stuck_attempts() -> None:
    stuck = end(
        None,
        counters=Counters(attempts_without_progress=2),
        committed_step=None,
        last_step=10,
        limits={"max_failures": 9},
    )
    moving = end(
        None,
        counters=Counters(attempts_without_progress=2),
        committed_step=None,
        last_step=17,
        limits={"max_failures": 9},
    )
    assert stuck.reason == moving.reason == "no-progress"
    assert "finished no new step: read its logs" in (stuck.message or "")
    assert "did 7 new steps" in (moving.message or "") and "`ratchet fork job-1 --set" in (moving.message or "")
    assert "`ratchet resume job-1`" in (stuck.message or "") and "`ratchet resume job-1`" in (moving.message or "")
    first = end(None, counters=Counters(attempts_without_progress=2), base_step=None, committed_step=None, last_step=7)
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
        ([{"codes": ["70-80"], "action": "fail"}], "/0/codes/0", "exit-code-reserved", "74 already has a meaning"),
        ([{"codes": [1], "action": "fail"}], "/0/codes/0", "exit-code-reserved", "any uncaught exception"),
        ([{"codes": [256], "action": "fail"}], "/0/codes/0", "exit-code-reserved", "range is 0 to 255"),
        ([{"codes": [-9], "action": "fail"}], "/0/codes/0", "exit-code-reserved", "range is 0 to 255"),
        ([{"codes": [42, 42], "action": "fail"}], "/0/codes/1", "exit-code-twice", "named by"),
        (
            [{"codes": [42], "action": "fail"}, {"codes": ["40-49"], "action": "retry"}],
            "/1/codes/0", "exit-code-twice", "/policy/exit_codes/0/codes/0",
        ),
        ([{"codes": ["19-10"], "action": "fail"}], "/0/codes/0", "value-error", "the smaller one first"),
        ([{"codes": [True], "action": "fail"}], "/0/codes/0", "value-error", "not True"),
        ([{"codes": ["1_0"], "action": "fail"}], "/0/codes/0", "value-error", "must be like '10-19'"),
        ([{"codes": [], "action": "fail"}], "/0/codes", "too-short", "at least 1"),
        ([{"codes": [42], "action": "ignore"}], "/0/action", "literal-error", "'retry', 'fail' or 'preempted'"),
    ],
)  # fmt: skip
def test_invalid_exit_code_rules_are_refused(rules: Any, pointer: str, code: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        policy(*rules)
    problem = caught.value.errors[0]
    assert (problem.pointer, problem.code) == (f"/policy/exit_codes{pointer}", code) and says in problem.detail


def test_own_code_excludes_reserved_exit_codes() -> None:
    assert RESERVED.keys() >= CAUSE_OF_EXIT_CODE.keys()
    assert [script_exit_code(code) for code in (2, 255, *RESERVED, 256, -1, True, "2", None)] == [
        2,
        255,
        *[None] * (len(RESERVED) + 5),
    ]
    assert policy({"codes": [2, "3-4"], "action": "retry"}).exit_codes[0].matches(4)
