"""The rules of ``decide`` as tables over every cause and every wish."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from ratchet_contract.phases import Budget, Cause, Desired, Event, JobPhase, Outcome
from ratchet_contract.protocol.timing import max_control_delay
from ratchet_service.lifecycle.decide import MAX_BACKOFF, backoff_seconds, decide
from ratchet_service.lifecycle.decision import Action, Alive, AttemptEnd, Counters, Decision, JobView, Limits

NOW = datetime(2026, 1, 1, tzinfo=UTC)
GRACEFUL = {
    c for c in Cause if c.outcome in (Outcome.SUCCEEDED, Outcome.PREEMPTED, Outcome.SUSPENDED, Outcome.CANCELLED)
}


def end(
    cause: Cause,
    desired: Desired = Desired.RUN,
    *,
    counters: Counters = Counters(),
    limits: Limits = Limits(),
    committed: int | None = 20,
    finished: bool = False,
    unmanaged: bool = False,
    begun: bool = True,
) -> Decision:
    base = None if unmanaged else 10
    attempt = AttemptEnd(cause, base, committed, begun=begun, finished=finished, unmanaged=unmanaged, message="why")
    phase = JobPhase.RUNNING if desired is Desired.RUN else JobPhase.STOPPING
    view = JobView("job-1", phase, desired, attempt_number=3, counters=counters, limits=limits, attempt=attempt)
    return decide(view, NOW)


def expected_event(cause: Cause, desired: Desired) -> Event:
    """The rules in other words: what a job becomes after an attempt with progress, budgets left and no final checkpoint."""
    if cause is Cause.API_CANCEL or desired is Desired.CANCEL:
        return Event.END_CANCELLED
    if cause in (Cause.USER_ERROR, Cause.TIMEOUT):
        return Event.END_FAILED
    if desired is Desired.SUSPEND:
        return Event.END_SUSPENDED
    if cause is Cause.COMPLETED and desired is Desired.RUN:
        return Event.END_SUCCEEDED
    return Event.END_REQUEUE


@pytest.mark.parametrize("desired", Desired)
@pytest.mark.parametrize("cause", Cause)
def test_attempt_end_event_for_every_cause_and_desired_state(cause: Cause, desired: Desired) -> None:
    decision = end(cause, desired)
    assert decision.action is Action.END
    assert decision.event is expected_event(cause, desired)
    clean_stop = cause is Cause.COMPLETED and desired is not Desired.RUN
    assert (decision.cause is cause) is not clean_stop


@pytest.mark.parametrize("desired", Desired)
@pytest.mark.parametrize("cause", Cause)
def test_graceful_end_with_final_checkpoint_is_success(cause: Cause, desired: Desired) -> None:
    decision = end(cause, desired, finished=True)
    if cause in GRACEFUL:
        assert (decision.event, decision.cause) == (Event.END_SUCCEEDED, Cause.COMPLETED)
        assert decision.counters == Counters()
    else:
        assert decision.event is expected_event(cause, desired)


@pytest.mark.parametrize("desired", Desired)
@pytest.mark.parametrize("cause", Cause)
def test_script_stopped_after_last_step_is_not_success(cause: Cause, desired: Desired) -> None:
    decision = end(cause, desired, finished=True, limits=Limits(is_script=True))
    assert decision.event is (Event.END_SUCCEEDED if cause is Cause.COMPLETED else expected_event(cause, desired))


@pytest.mark.parametrize(
    ("desired", "cause"),
    [(Desired.SUSPEND, Cause.API_SUSPEND), (Desired.CANCEL, Cause.API_CANCEL), (Desired.PREEMPT, Cause.API_PREEMPT)],
)
def test_clean_exit_during_stop_has_cause_of_stop(desired: Desired, cause: Cause) -> None:
    assert end(Cause.COMPLETED, desired).cause is cause


@pytest.mark.parametrize("desired", Desired)
@pytest.mark.parametrize("cause", Cause)
@pytest.mark.parametrize("committed", [None, 10, 20])
def test_each_cause_counts_against_own_budget(cause: Cause, desired: Desired, committed: int | None) -> None:
    decision = end(
        cause, desired, counters=Counters(preemptions=1, failures=1, attempts_without_progress=1), committed=committed
    )
    if decision.event is Event.END_SUCCEEDED:
        return
    assert decision.cause is not None
    progress = committed == 20
    failed = decision.cause.budget in (Budget.FAILURES, Budget.FATAL)
    assert decision.counters.preemptions == 1 + (decision.cause.budget is Budget.PREEMPTIONS)
    assert decision.counters.failures == (0 if progress else 1) + failed
    pause = decision.cause.outcome is Outcome.SUSPENDED
    moved = pause or decision.cause is Cause.UPGRADE
    assert decision.counters.attempts_without_progress == (0 if progress else 1 if moved else 2)


@pytest.mark.parametrize("cause", Cause)
def test_attempt_preempted_before_start_is_not_without_progress(cause: Cause) -> None:
    decision = end(cause, counters=Counters(attempts_without_progress=2), committed=None, begun=False)
    if cause.outcome is Outcome.PREEMPTED:
        assert (decision.event, decision.counters.attempts_without_progress) == (Event.END_REQUEUE, 2)
        assert decision.counters.preemptions == (cause is not Cause.UPGRADE)
    elif cause.budget is Budget.FAILURES:
        assert (decision.event, decision.reason) == (Event.END_FAILED, "no-progress")


@pytest.mark.parametrize("committed", [None, 20])
def test_attempt_preempted_by_scheduler_is_not_without_progress(committed: int | None) -> None:
    attempt = AttemptEnd(Cause.HIGHER_PRIORITY, 10, committed)
    here = JobView(
        "job-1",
        JobPhase.STOPPING,
        Desired.PREEMPT,
        Cause.HIGHER_PRIORITY,
        counters=Counters(attempts_without_progress=2),
    )
    decision = decide(replace(here, attempt=attempt), NOW)
    assert (decision.event, decision.counters) == (
        Event.END_REQUEUE,
        Counters(preemptions=1, attempts_without_progress=2 if committed is None else 0),
    )
    elsewhere = decide(replace(here, desired_cause=Cause.API_PREEMPT, attempt=attempt), NOW)
    assert (elsewhere.event is Event.END_FAILED) == (committed is None)


@pytest.mark.parametrize("cause", [c for c in Cause if c.budget is Budget.FAILURES])
def test_job_fails_when_failure_budget_is_used_up(cause: Cause) -> None:
    limits = Limits(max_failures=2)
    assert end(cause, counters=Counters(failures=1), limits=limits, committed=None).event is Event.END_REQUEUE
    last = end(cause, counters=Counters(failures=2), limits=limits, committed=None)
    assert (last.event, last.reason) == (Event.END_FAILED, "max-failures")
    assert last.message is not None and "why" in last.message
    assert end(cause, counters=Counters(failures=2), limits=limits, committed=20).event is Event.END_REQUEUE
    first = end(cause, limits=Limits(max_failures=0))
    assert first.event is Event.END_FAILED
    assert first.message is not None and first.message.startswith("1 failure without progress, 0 allowed")


@pytest.mark.parametrize("desired", Desired)
@pytest.mark.parametrize("cause", Cause)
def test_unmanaged_attempt_never_counts_as_without_progress(cause: Cause, desired: Desired) -> None:
    before = Counters(preemptions=7, failures=1, attempts_without_progress=2)
    decision = end(cause, desired, counters=before, committed=None, unmanaged=True)
    assert decision.event is expected_event(cause, desired)
    assert decision.event is Event.END_SUCCEEDED or decision.counters.attempts_without_progress == 0
    if decision.event is not Event.END_SUCCEEDED:
        assert decision.cause is not None
        assert decision.counters.preemptions == 7 + (decision.cause.budget is Budget.PREEMPTIONS)
        assert decision.counters.failures == 1 + (decision.cause.budget in (Budget.FAILURES, Budget.FATAL))


@pytest.mark.parametrize("cause", [c for c in Cause if c.budget is Budget.FAILURES])
def test_unmanaged_script_failures_count_against_max_failures(cause: Cause) -> None:
    last = end(cause, counters=Counters(failures=3), committed=None, unmanaged=True)
    assert (last.event, last.reason) == (Event.END_FAILED, "max-failures")
    assert "without a Session" in (last.message or "")


def test_unmanaged_script_ending_by_sigterm_is_retried_with_backoff() -> None:
    def again(cause: Cause, preemptions: int, seconds: float, *, unmanaged: bool = True) -> Decision:
        attempt = AttemptEnd(cause, unmanaged=unmanaged, seconds=seconds, message="why")
        view = JobView("job-1", JobPhase.RUNNING, counters=Counters(preemptions=preemptions), attempt=attempt)
        return decide(view, NOW)

    waits = [again(Cause.SIGTERM, n, 1.5) for n in range(12)]
    delays = [0.0 if w.not_before is None else (w.not_before - NOW).total_seconds() for w in waits]
    assert delays[0] == 0.0 and 2.4 * 2**3 < delays[5] < 300 and delays[11] > 230
    assert waits[5].reason == "backoff" and "Tried again after" in (waits[5].message or "")
    assert again(Cause.SIGTERM, 11, 3600.0).not_before is None  # a machine that is taken away now and then
    assert again(Cause.API_PREEMPT, 11, 1.5).not_before is None  # somebody wants it so
    assert again(Cause.SIGTERM, 1, 1.5, unmanaged=False).not_before is None  # ended by no-progress soon


@pytest.mark.parametrize("cause", [c for c in Cause if c.budget is Budget.PREEMPTIONS])
def test_preemptions_have_their_own_budget(cause: Cause) -> None:
    many = Counters(preemptions=1000, failures=3)
    assert end(cause, counters=many).event is Event.END_REQUEUE
    assert end(cause, counters=Counters(preemptions=1), limits=Limits(max_preemptions=2)).event is Event.END_REQUEUE
    last = end(cause, counters=Counters(preemptions=2), limits=Limits(max_preemptions=2))
    assert (last.event, last.reason) == (Event.END_FAILED, "max-preemptions")
    assert last.message is not None and "`ratchet resume job-1`" in last.message


@pytest.mark.parametrize("cause", [c for c in Cause if expected_event(c, Desired.RUN) is Event.END_REQUEUE])
def test_job_fails_after_repeated_attempts_without_progress(cause: Cause) -> None:
    """Who is killed from outside may have as many as ``max_failures``, if these are more."""
    outside = cause in (Cause.RANK_KILLED, Cause.OOM) or cause.outcome is Outcome.LOST
    limits = Limits(max_failures=20)
    most = 20 if outside else 3
    counters = Counters()
    events = []
    for _ in range(most):
        decision = end(cause, counters=counters, limits=limits, committed=10)
        counters = decision.counters
        events.append((decision.event, decision.reason == "no-progress"))
    if cause in (Cause.API_SUSPEND, Cause.UPGRADE):
        assert events[-1] == (Event.END_REQUEUE, False)
    else:
        assert events == [(Event.END_REQUEUE, False)] * (most - 1) + [(Event.END_FAILED, True)]


@pytest.mark.parametrize(
    ("causes", "over"),
    [
        ("kkkkk", False),
        ("kek", False),  # the limit goes by the last end: three, where it is the job's own fault
        ("kkek", False),
        ("kke", True),
        ("eke", True),
        ("kkkke", True),
    ],
)
def test_no_progress_limit_depends_on_latest_cause(causes: str, over: bool) -> None:
    counters, decision = Counters(), None
    for letter in causes:
        cause = Cause.RANK_KILLED if letter == "k" else Cause.EXCEPTION
        decision = end(cause, counters=counters, limits=Limits(max_failures=20), committed=None)
        counters = decision.counters
    assert decision is not None and (decision.reason == "no-progress") is over
    again = end(Cause.EXCEPTION, counters=counters, limits=Limits(max_failures=20))
    assert again.counters.attempts_without_progress == 0, "a new step forgives all"


def test_failing_saves_are_not_advised_to_save_more_often() -> None:
    attempt = AttemptEnd(
        Cause.CHECKPOINT_ERROR, 10, None, last_step=31, message="3 saves in a row failed, the last at step 28"
    )
    view = JobView(
        "job-1",
        JobPhase.RUNNING,
        Desired.RUN,
        attempt_number=3,
        counters=Counters(attempts_without_progress=2),
        attempt=attempt,
    )
    text = str(decide(view, NOW).message)
    assert (
        "the last at step 28" in text and "follow the advice of the last failure" in text and "every_steps" not in text
    )


def delay(cause: Cause, failures: int = 0, committed: int | None = 10) -> float:
    """Seconds until the next attempt, after ``failures`` before this one; without a new step unless ``committed`` > 10."""
    counters = Counters(failures=failures)
    not_before = end(cause, counters=counters, limits=Limits(backoff=8.0), committed=committed).not_before
    return 0.0 if not_before is None else (not_before - NOW).total_seconds()


def test_only_failures_back_off_and_lost_attempts_longer() -> None:
    delays = {cause: delay(cause, 1) for cause in Cause}
    for cause, seconds in delays.items():
        assert (seconds > 0) is (cause.budget is Budget.FAILURES), cause
    assert delays[Cause.UNKNOWN] == pytest.approx(2 * delays[Cause.HANG]) == pytest.approx(4 * delays[Cause.EXCEPTION])


@pytest.mark.parametrize("cause", [c for c in Cause if c.budget is Budget.FAILURES])
def test_first_failure_is_retried_at_once_unless_machine_related(cause: Cause) -> None:
    at_once = cause in (Cause.RANK_KILLED, Cause.OOM, Cause.EXCEPTION)
    waits = [delay(cause, failures) for failures in range(3)]
    assert (waits[0] == 0.0) is at_once
    assert waits[1] > 0.0 and waits[2] == pytest.approx(2 * waits[1])
    assert delay(cause, 2, committed=20) == pytest.approx(waits[0]), "progress forgives what came before"
    reason = end(cause, committed=10).reason
    assert reason == (cause.value if at_once else "backoff")


def test_backoff_doubles_up_to_cap_with_deterministic_jitter() -> None:
    nominal = [1.0 * 2**n for n in range(9)] + [MAX_BACKOFF] * 60
    for nth, wanted in enumerate(nominal, start=1):
        seconds = backoff_seconds("job-1", nth, nth, 1.0)
        assert 0.8 * wanted <= seconds <= min(MAX_BACKOFF, 1.2 * wanted)
        assert seconds == backoff_seconds("job-1", nth, nth, 1.0)
    assert len({backoff_seconds(f"job-{i}", 1, 1, 1.0) for i in range(50)}) == 50


def test_queued_job_waits_until_not_before_then_launches() -> None:
    later = NOW + timedelta(seconds=5)
    waiting = decide(JobView("job-1", JobPhase.QUEUED, not_before=later), NOW)
    assert (waiting.action, waiting.not_before) == (Action.WAIT, later)
    assert decide(JobView("job-1", JobPhase.QUEUED, not_before=later), later).action is Action.LAUNCH
    ahead = NOW + timedelta(days=1)  # written while the clock was a day ahead
    assert decide(JobView("job-1", JobPhase.QUEUED, not_before=ahead), NOW).action is Action.LAUNCH
    over = JobView("job-1", JobPhase.QUEUED, limits=Limits(timeout=60), running_seconds=60)
    assert (decide(over, NOW).event, decide(over, NOW).reason) == (Event.END_FAILED, "timeout")


@pytest.mark.parametrize("phase", [p for p in JobPhase if not p.active and p is not JobPhase.QUEUED])
def test_inactive_job_needs_no_action(phase: JobPhase) -> None:
    assert decide(JobView("job-1", phase), NOW).action is Action.NOTHING


def alive(attempt: Alive, desired: Desired = Desired.RUN, waited: float = 0.0, limits: Limits = Limits()) -> Decision:
    phase = JobPhase.RUNNING if desired is Desired.RUN else JobPhase.STOPPING
    attempt = replace(attempt, stop_requested_seconds=waited)
    view = JobView("job-1", phase, desired, limits=limits, running_seconds=30.0, attempt=attempt)
    return decide(view, NOW)


def test_running_attempt_needs_no_action() -> None:
    assert alive(Alive(age=1e6, seen=True)).action is Action.NOTHING
    assert alive(Alive(age=1.0, seen=False)).action is Action.NOTHING
    assert alive(Alive(age=1.0, seen=True), Desired.SUSPEND, waited=129).action is Action.NOTHING


def test_agent_never_seen_is_killed_as_launcher_error() -> None:
    decision = alive(Alive(age=60.0, seen=False))
    assert (decision.action, decision.cause) == (Action.KILL, Cause.LAUNCHER_ERROR)


@pytest.mark.parametrize(
    ("desired", "cause"),
    [(Desired.CANCEL, Cause.API_CANCEL), (Desired.SUSPEND, Cause.HANG), (Desired.PREEMPT, Cause.HANG)],
)
def test_overdue_stop_is_enforced_then_killed(desired: Desired, cause: Cause) -> None:
    first = alive(Alive(age=500.0, seen=True), desired, waited=130)
    assert (first.action, first.cause) == (Action.STOP, cause)
    asked = Alive(age=505.0, seen=True, signalled_seconds=5.0, signal_cause=cause)
    assert alive(asked, desired, waited=135).action is Action.NOTHING
    late = Alive(age=510.0, seen=True, signalled_seconds=10.0, signal_cause=cause)
    assert alive(late, desired, waited=140) == Decision(Action.KILL, cause=cause)


@pytest.mark.parametrize(("grace", "stopped_after"), [(120.0, 130.0), (8.0, 10.0)])
def test_ranks_get_full_stop_grace_despite_control_delay(grace: float, stopped_after: float) -> None:
    limits, seen = Limits(stop_grace=grace), Alive(age=500.0, seen=True)
    assert alive(seen, Desired.CANCEL, waited=stopped_after - 0.1, limits=limits).action is Action.NOTHING
    assert alive(seen, Desired.CANCEL, waited=stopped_after, limits=limits).action is Action.STOP
    assert max_control_delay(grace) == stopped_after - grace


def test_the_timeout_counts_all_attempts() -> None:
    limits = Limits(timeout=100.0)
    assert alive(Alive(age=0.0, running_seconds=69.0, seen=True), limits=limits).action is Action.NOTHING
    decision = alive(Alive(age=0.0, running_seconds=70.0, seen=True), limits=limits)
    assert (decision.action, decision.cause) == (Action.STOP, Cause.TIMEOUT)


def test_an_active_job_without_an_attempt_is_an_error() -> None:
    with pytest.raises(ValueError, match="no attempt"):
        decide(JobView("job-1", JobPhase.RUNNING), NOW)


def raised(
    seen: bool = True,
    *,
    done: int = 0,
    unmanaged: bool = False,
    seconds: float = 5.0,
    error_after: int | None = None,
    attempts: int = 1,
    limits: Limits = Limits(max_failures=5),
) -> Decision:
    """One more attempt after ``attempts`` that an exception ends, ``done`` steps after its base; ``seen``: at the line of the one
    before; ``error_after``: the last step of its rank."""
    attempt = AttemptEnd(
        Cause.EXCEPTION, 10, None, unmanaged=unmanaged, seconds=seconds, message="TypeError: no", last_step=10 + done,
        repeated_error=(10 + done if error_after is None else error_after) if seen else None,
    )  # fmt: skip
    counters = Counters(failures=attempts, attempts_without_progress=attempts)
    return decide(
        JobView("job-1", JobPhase.RUNNING, attempt_number=2, counters=counters, limits=limits, attempt=attempt), NOW
    )


def test_the_same_error_before_the_first_step_is_not_tried_a_third_time() -> None:
    over = raised()
    assert (over.event, over.reason) == (Event.END_FAILED, "same-error")
    assert over.message is not None and over.message.count("TypeError: no") == 1
    assert raised(unmanaged=True).reason == "same-error"
    assert (
        raised(done=1, error_after=10).reason == "same-error"
    )  # another rank finished the step that this one failed in
    for again in (raised(False), raised(done=1), raised(unmanaged=True, seconds=400.0)):
        assert again.event is Event.END_REQUEUE


def test_repeated_error_at_later_step_does_not_advise_checkpoints() -> None:
    over = raised(done=7, attempts=2)
    assert (over.event, over.reason) == (Event.END_FAILED, "no-progress")
    assert over.message is not None and "checkpoint" not in over.message
    assert "same error at the same line and step" in over.message and "`--code DIR`" in over.message
    other = raised(False, done=7, attempts=2)
    assert other.message is not None and "checkpoint.every_steps" in other.message


@pytest.mark.parametrize("cause", [Cause.EXCEPTION, Cause.CHECKPOINT_ERROR])
def test_max_failures_message_advises_resume(cause: Cause) -> None:
    over = end(cause, counters=Counters(failures=3), committed=None)
    assert over.reason == "max-failures"
    assert over.message is not None and "`ratchet resume job-1`" in over.message


def test_failure_message_offers_new_code_only_where_allowed() -> None:
    def told(other_code: bool) -> list[str | None]:
        limits = Limits(max_failures=5, can_change_code=other_code)
        ends = [
            raised(limits=limits),
            raised(attempts=2, seen=False, limits=limits),
            raised(limits=replace(limits, max_failures=1)),
        ]
        assert [over.reason for over in ends] == ["same-error", "no-progress", "max-failures"]
        return [over.message for over in ends]

    assert all(text is not None and "--code DIR" in text for text in told(True))
    assert all(text is not None and "--code" not in text and "`ratchet resume job-1`" in text for text in told(False))


@pytest.mark.parametrize(
    ("attempt", "desired", "action", "cause"),
    [
        (Alive(1.0, True), Desired.RUN, Action.STOP, Cause.UPGRADE),
        (Alive(1.0, True), Desired.SUSPEND, Action.STOP, Cause.API_SUSPEND),  # it hears of no wish: by signal, at once
        (Alive(1.0, True), Desired.CANCEL, Action.STOP, Cause.API_CANCEL),
        (Alive(1.0, False), Desired.RUN, Action.KILL, Cause.UPGRADE),
        (Alive(1.0, False, waiting=True), Desired.RUN, Action.KILL, Cause.UPGRADE),
        (Alive(1.0, True, unmanaged=True), Desired.RUN, Action.NOTHING, None),
        (Alive(1.0, True, unmanaged=True), Desired.PREEMPT, Action.STOP, Cause.API_PREEMPT),
        (
            Alive(1.0, True, signalled_seconds=129.0, signal_cause=Cause.UPGRADE, killable_after=130.0),
            Desired.RUN,
            Action.NOTHING,
            None,
        ),
        (
            Alive(1.0, True, signalled_seconds=130.0, signal_cause=Cause.UPGRADE, killable_after=130.0),
            Desired.RUN,
            Action.KILL,
            Cause.UPGRADE,
        ),
    ],
)
def test_agent_of_other_protocol_is_stopped_or_killed_unless_unmanaged(
    attempt: Alive, desired: Desired, action: Action, cause: Cause | None
) -> None:
    decision = alive(replace(attempt, other_protocol=True), desired)
    assert (decision.action, decision.cause) == (action, cause)


def test_upgrade_counts_against_no_budget() -> None:
    """Also where no new step was saved, again and again, and no preemption is allowed."""
    used, limits = (
        Counters(preemptions=2, failures=3, attempts_without_progress=2),
        Limits(max_preemptions=2, max_failures=3),
    )
    decision = end(Cause.UPGRADE, counters=used, limits=limits, committed=None)
    assert (decision.event, decision.counters, decision.not_before) == (Event.END_REQUEUE, used, None)


def test_upgrade_refusals_are_retried_with_backoff_at_no_cost() -> None:
    limits, refused = Limits(max_preemptions=0, max_failures=0), AttemptEnd(Cause.UPGRADE, seconds=0.5, message="why")
    view = JobView("job-1", JobPhase.RUNNING, attempt_number=3, limits=limits, attempt=refused)
    waits = []
    for _ in range(20):
        decision = decide(view, NOW)
        assert decision.event is Event.END_REQUEUE and decision.not_before and "why" in str(decision.message)
        waits.append((decision.not_before - NOW).total_seconds())
        view = replace(view, counters=decision.counters)
    assert 0.0 < waits[0] < 1.0 and waits[-1] > 0.7 * MAX_BACKOFF
    assert replace(view.counters, retries=0) == Counters()
