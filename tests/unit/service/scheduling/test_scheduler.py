"""A scheduling pass decides from rows alone: starts, waits, stops and ends."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ratchet_contract.phases import Event, Reason
from ratchet_service.scheduling.fair_order import UNLIMITED, Limit, Queued, Share
from ratchet_service.scheduling.preemption import Running
from ratchet_service.scheduling.scheduler import (
    CREATION_FAILED,
    MAX_STARTS,
    QueueState,
    Row,
    Schedule,
    schedule,
)
from ratchet_service.scheduling.slots import Capacity, Grant, Need

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def row(job: str, cpus: int = 1, *, owner: str = "ada", priority: int = 0, kind: str = "local", **more: Any) -> Row:
    """A queued job; later names are younger. ``cpus``: slots that it needs, as ranks of its share, too."""
    gpus, since = more.pop("gpus", 0), more.pop("claimed_since", None)
    age = timedelta(seconds=sum(map(ord, job)))
    queued = Queued(job, owner, priority, NOW + age, Share(gpus, cpus, 1), since)
    return Row(queued, kind, need=Need(gpus, cpus), name=job, **more)


def state(
    rows: Sequence[Row] = (), held: Any = (), running: Any = (), owned: Any = None, limit: Limit = UNLIMITED
) -> QueueState:
    return QueueState(rows, {"local": True, "engine": False}, held, running, owned or {}, lambda _: limit)


def run(
    *rows: Row,
    cpus: int = 4,
    gpus: int = 0,
    held: Any = (),
    running: Any = (),
    limit: Limit = UNLIMITED,
    scope: Any = "owner",
    tried: Any = (),
) -> Schedule:
    owned = {"ada": Share(0, sum(len(grant.cpus) for grant in held), len(held))}
    return schedule(state(rows, held, running, owned, limit), Capacity(tuple(range(gpus)), cpus), scope, NOW, tried)


def started(plan: Schedule) -> dict[str, Grant]:
    return {start.row.queued.job: start.grant for start in plan.starts}


def waiting(plan: Schedule) -> dict[str, tuple[str, str]]:
    return {wait.row.queued.job: (wait.reason, wait.full_message) for wait in plan.waits}


def test_oldest_jobs_start_until_no_slot_is_left() -> None:
    plan = run(row("c"), row("a", 2), row("b"), row("d"), cpus=4)
    assert started(plan) == {"a": Grant((), (0, 1)), "b": Grant((), (2,)), "c": Grant((), (3,))}
    assert plan.exhausted and [one.queued.job for one in plan.passed_over] == ["d"] and not plan.waits


def test_slots_are_reserved_for_a_large_job_so_that_small_ones_do_not_starve_it() -> None:
    plan = run(row("a", 4), row("b"), cpus=4, held=[Grant((), (0,), "x")])
    assert not plan.starts and plan.exhausted
    assert waiting(plan) == {"a": (Reason.NO_SLOT, "waits for 4 of 4 CPU slots (3 free; x has 1)")}


def test_reason_that_a_row_has_is_not_stored_again() -> None:
    held = [Grant((), (0,), "x")]
    told = run(row("a", 4), held=held).waits[0]
    assert not run(row("a", 4, reason=told.reason, message=told.full_message), held=held).waits


def test_job_of_an_engine_needs_no_slot() -> None:
    assert started(run(row("a", 9, kind="engine"), held=[Grant((), (0, 1, 2, 3), "x")])) == {"a": Grant()}


def test_one_pass_starts_a_limited_number_of_jobs() -> None:
    plan = run(*(row(f"j{i:02}") for i in range(20)), cpus=64)
    assert len(plan.starts) == MAX_STARTS and len(plan.passed_over) == 20 - MAX_STARTS and not plan.exhausted


def test_quota_holds_jobs_back_and_says_why() -> None:
    plan = run(row("a"), row("b"), row("c", owner="bob"), limit=Limit(jobs=1))
    assert list(started(plan)) == ["a", "c"]
    assert waiting(plan)["b"][0] == Reason.QUOTA and "0 of 1 jobs are held" in waiting(plan)["b"][1]


def test_job_that_needs_more_gpus_than_the_machine_has_reserves_nothing() -> None:
    plan = run(row("a", gpus=4), row("b"), gpus=2)
    assert list(started(plan)) == ["b"] and "needs 4 GPUs, this machine has 2" in waiting(plan)["a"][1]


def test_attempts_of_lower_priority_are_stopped_for_a_waiting_job() -> None:
    low = Running("low", 3, "ada", 0, Need(0, 4), started_at=NOW)
    plan = run(row("high", 4, priority=5), held=[Grant((), (0, 1, 2, 3), "low")], running=[low])
    assert [(wait.row.queued.job, list(wait.victims)) for wait in plan.waits] == [("high", [low])]
    assert plan.waits[0].full_message.endswith("; slots are being freed for it")
    none = run(row("high", 4, priority=5), held=[Grant((), (0, 1, 2, 3), "low")], running=[low], scope="off")
    assert not none.waits and [one.queued.job for one in none.passed_over] == ["high"]


def test_stop_requested_earlier_is_not_repeated() -> None:
    low = Running("low", 3, "ada", 0, Need(0, 4), stopping=True, started_at=NOW)
    plan = run(row("high", 4, priority=5, claimed_since=NOW), held=[Grant((), (0, 1, 2, 3), "low")], running=[low])
    assert [list(wait.victims) for wait in plan.waits] == [[]]
    assert plan.waits[0].full_message.endswith("; slots are being freed for it")


def test_jobs_whose_attempt_could_not_be_created_come_last_and_share_slots() -> None:
    failed = [row(job, 4, reason=CREATION_FAILED) for job in ("a", "b")]
    assert list(started(run(*failed, row("c", 4)))) == ["c"]
    plan = run(*failed)
    assert started(plan) == {"a": Grant((), (0, 1, 2, 3)), "b": Grant((), (0, 1, 2, 3))}
    assert plan.starts[0].grant.overlaps(plan.starts[1].grant)


def test_quota_counts_only_what_a_job_needs() -> None:
    """Of GPUs, the owner holds more than a quota that was lowered since; the job needs none."""
    owned, limit = {"ada": Share(4, 4, 1)}, Limit(gpus=2)
    plan = schedule(state([row("a")], owned=owned, limit=limit), Capacity((), 4), "owner", NOW)
    assert list(started(plan)) == ["a"]


def test_job_that_was_tried_keeps_its_place_and_its_quota_but_not_its_slots() -> None:
    plan = run(row("a", 4), row("b"), row("c", owner="bob"), limit=Limit(jobs=1), tried={("a", 0)})
    assert list(started(plan)) == ["c"] and waiting(plan)["b"][0] == Reason.QUOTA


def test_decision_made_again_for_the_concerned_jobs_alone_is_the_same() -> None:
    low = Running("low", 3, "ada", 0, Need(0, 1), started_at=NOW)
    rows = [
        row("a"),
        row("b", 3, priority=1),
        row("c", 9, priority=5),
        row("d"),
        row("e", timeout=1.0, running_seconds=2),
    ]
    held = [Grant((), (0,), "low")]
    whole = run(*rows, held=held, running=[low])
    again = run(*(one for one in rows if one.queued.job in whole.concerned), held=held, running=[low])
    assert again.starts == whole.starts and again.waits == whole.waits and again.ends == whole.ends


def test_job_past_its_timeout_ends_without_another_attempt() -> None:
    plan = run(row("a", timeout=60.0, running_seconds=61.0), row("b", timeout=60.0, running_seconds=59.0))
    assert list(started(plan)) == ["b"]
    assert [(end.row.queued.job, end.decision.event, end.decision.reason) for end in plan.ends] == [
        ("a", Event.END_FAILED, "timeout")
    ]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.sampled_from("abc"), st.integers(0, 2), st.booleans()), max_size=12),
    st.integers(1, 5),
    st.sampled_from([UNLIMITED, Limit(jobs=2), Limit(ranks=4)]),
)
def test_every_job_is_decided_once_and_no_slot_is_granted_twice(
    jobs: list[tuple[int, str, int, bool]], cpus: int, limit: Limit
) -> None:
    rows = [
        row(f"j{i:02}", need, owner=owner, priority=priority, reason=CREATION_FAILED if failed else None)
        for i, (need, owner, priority, failed) in enumerate(jobs)
    ]
    plan = schedule(state(rows, limit=limit), Capacity((), cpus), "owner", NOW)
    again = schedule(
        state([one for one in rows if one.queued.job in plan.concerned], limit=limit), Capacity((), cpus), "owner", NOW
    )
    assert (again.starts, again.waits, again.ends) == (plan.starts, plan.waits, plan.ends)
    decided = [one.row.queued.job for one in (*plan.starts, *plan.waits, *plan.ends)]
    decided += [one.queued.job for one in plan.passed_over]
    silent = {one.queued.job for one in rows if one.reason == CREATION_FAILED}  # they keep the reason that they have
    assert len(decided) == len(set(decided)) and set(decided) | silent == {one.queued.job for one in rows}
    taken = [cpu for start in plan.starts if start.row.reason != CREATION_FAILED for cpu in start.grant.cpus]
    assert len(taken) == len(set(taken)) and set(taken) <= set(range(cpus))
    for owner in "abc":
        first = [start.row for start in plan.starts if start.row.queued.owner == owner]
        assert limit.jobs is None or len(first) <= limit.jobs
        assert limit.ranks is None or sum(one.queued.share.ranks for one in first) <= limit.ranks
