"""The order of the queue: a total one, owners take turns, quotas hold back their own owner alone."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet_service.scheduling.fair_order import UNLIMITED, Limit, Place, Queued, Share, order_queue
from ratchet_service.scheduling.preemption import PreemptionPlanner, Running, Scope
from ratchet_service.scheduling.slots import Need

START = datetime(2030, 1, 1, tzinfo=UTC)


def job(name: str, owner: str = "a", *, at: int = 0, priority: int = 0, gpus: int = 0, ranks: int = 1) -> Queued:
    return Queued(name, owner, priority, START + timedelta(seconds=at), Share(gpus, ranks, 1))


def names(places: list[Place]) -> list[str]:
    return [place.queued.job + ("!" if place.held_back_reason else "") for place in places]


def order(*jobs: Queued, held: dict[str, Share] | None = None, quotas: dict[str, Limit] | None = None) -> list[str]:
    limits = quotas or {}
    return names(order_queue(jobs, held or {}, lambda owner: limits.get(owner, UNLIMITED)))


def test_queue_order_is_priority_then_owner_share_then_age() -> None:
    assert order(job("late", at=2), job("early", at=1), job("urgent", at=3, priority=1)) == ["urgent", "early", "late"]
    both = job("a1", "a", at=1), job("b1", "b", at=2)
    assert order(*both) == ["a1", "b1"]
    assert order(*both, held={"a": Share(0, 1, 1)}) == ["b1", "a1"]
    assert order(*both, held={"a": Share(0, 1, 1), "b": Share(0, 8, 1)}) == ["a1", "b1"]
    assert order(*both, held={"a": Share(1, 1, 1), "b": Share(0, 8, 1)}) == ["b1", "a1"]  # GPUs before ranks
    assert order(*both, job("a2", "a", priority=5), held={"a": Share(8, 8, 8)}) == ["a2", "b1", "a1"]


def test_owners_take_turns_weighted_by_job_size() -> None:
    many = [job(f"a{i}", "a", at=i) for i in range(4)]
    assert order(*many, job("b0", "b", at=9), job("b1", "b", at=10)) == ["a0", "b0", "a1", "b1", "a2", "a3"]
    big = [job("a0", "a", at=0, ranks=3), job("a1", "a", at=1)]
    assert order(*big, *(job(f"b{i}", "b", at=5 + i) for i in range(4))) == ["a0", "b0", "b1", "b2", "a1", "b3"]


def test_job_with_preemption_claim_goes_first_within_priority() -> None:
    claiming = Queued("claims", "a", 0, START + timedelta(seconds=9), Share(0, 1, 1), claimed_since=START)
    later = Queued(
        "later", "c", 0, START, Share(0, 1, 1), claimed_since=START + timedelta(seconds=1)
    )  # whose owner holds nothing
    rows = later, job("old", "a", at=1), job("other", "b", at=0), claiming, job("urgent", "b", at=99, priority=1)
    assert order(*rows, held={"a": Share(4, 4, 4)}) == ["urgent", "claims", "later", "other", "old"]


@pytest.mark.parametrize(
    ("quota", "expected"),
    [
        (Limit(ranks=4), ["b0", "a0", "a1!", "a2!"]),
        (Limit(jobs=3), ["b0", "a0", "a1!", "a2!"]),
        (Limit(gpus=0), ["b0", "a0", "a1", "a2"]),  # nobody asks for one
        (Limit(ranks=2), ["b0", "a0!", "a1!", "a2!"]),
        (Limit(queued=0), ["b0", "a0", "a1", "a2"]),  # is looked at where jobs come in
    ],
)
def test_quota_holds_back_only_jobs_of_that_owner(quota: Limit, expected: list[str]) -> None:
    jobs = [job(f"a{i}", "a", at=i, ranks=2) for i in range(3)]
    held = {"a": Share(0, 2, 2)}
    assert order(*jobs, job("b0", "b", at=9, ranks=100), held=held, quotas={"a": quota}) == expected


def test_small_jobs_do_not_overtake_large_job_waiting_for_quota() -> None:
    large, small, cpu = job("large", at=1, gpus=4, ranks=4), job("small", at=2, gpus=1), job("cpu", at=3)
    held, quota = {"a": Share(2, 2, 1)}, {"a": Limit(gpus=4)}
    assert order(large, small, cpu, held=held, quotas=quota) == ["large!", "small!", "cpu"]
    never = job("never", at=0, gpus=5, ranks=5)  # keeps nothing from the others
    assert order(never, small, held=held, quotas=quota) == ["never!", "small"]


def test_quota_wait_message_shows_figures() -> None:
    places = order_queue(
        [job("x", ranks=2), job("y", at=1), job("z", at=2, ranks=9)], {"a": Share(0, 3, 1)}, lambda _: Limit(ranks=4)
    )
    assert [place.held_back_reason for place in places] == [
        "waits for its owner's quota: needs 2 ranks, 3 of 4 ranks are held",
        "waits for its owner's quota: needs 1 rank, 3 of 4 ranks are held, 2 are reserved for jobs ahead of it",
        "needs 9 ranks, its owner's quota is 4: an admin may raise it (`ratchet quota set OWNER`)",
    ]


OWNERS = st.sampled_from("abc")
JOBS = st.lists(
    st.tuples(OWNERS, st.integers(0, 3), st.integers(-1, 1), st.integers(0, 3), st.integers(1, 4), st.booleans()), max_size=14
)  # fmt: skip
HELD = st.dictionaries(OWNERS, st.builds(Share, st.integers(0, 4), st.integers(0, 8), st.integers(0, 3)))
LIMIT = st.one_of(st.none(), st.integers(0, 8))
QUOTAS = st.dictionaries(OWNERS, st.builds(Limit, queued=st.none(), jobs=LIMIT, ranks=LIMIT, gpus=LIMIT))


@settings(max_examples=200, deadline=None)
@given(JOBS, HELD, QUOTAS, st.randoms(use_true_random=False))
def test_queue_order_is_total_fair_and_within_quotas(
    drawn: list[tuple[str, int, int, int, int, bool]], held: dict[str, Share], quotas: dict[str, Limit], random: object
) -> None:
    jobs = [
        Queued(
            f"j{i}", owner, priority, START + timedelta(seconds=at), Share(gpus, ranks, 1), START if claims else None
        )
        for i, (owner, at, priority, gpus, ranks, claims) in enumerate(drawn)
    ]
    places = order_queue(jobs, held, lambda owner: quotas.get(owner, UNLIMITED))
    assert sorted(p.queued.job for p in places) == sorted(j.job for j in jobs)
    shuffled = sorted(jobs, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert order_queue(shuffled, held, lambda owner: quotas.get(owner, UNLIMITED)) == places

    has = defaultdict(Share, held)
    for i, place in enumerate(places):
        one, behind = place.queued, [p.queued for p in places[i:]]
        assert one.priority == max(b.priority for b in behind)
        equals = [b for b in behind if b.priority == one.priority]
        if not one.claimed_since:  # nobody who holds less is passed over, and within an owner nobody who is older
            assert not any(b.claimed_since for b in equals)
            assert all(has[one.owner][:2] <= has[b.owner][:2] for b in equals)
        own = [b for b in equals if b.owner == one.owner and b.claimed_since == one.claimed_since]
        assert one.created_at == min(b.created_at for b in own)
        if place.held_back_reason is None:
            has[one.owner] = has[one.owner].plus(one.share)
            quota = quotas.get(one.owner, UNLIMITED)
            for name in ("gpus", "ranks", "jobs"):
                limit = getattr(quota, name)
                assert limit is None or not getattr(one.share, name) or getattr(has[one.owner], name) <= limit


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 9)), max_size=12))
def test_queue_order_with_one_owner_is_first_come_first_served(drawn: list[tuple[int, int, int]]) -> None:
    jobs = [job(f"j{i:02}", at=at, gpus=gpus, ranks=ranks) for i, (at, gpus, ranks) in enumerate(drawn)]
    assert order(*jobs) == [j.job for j in sorted(jobs, key=lambda j: (j.created_at, j.job))]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(0, 2))
def test_no_owner_starves_behind_anothers_many_jobs(many: int, ranks: int, gpus: int) -> None:
    crowd = [job(f"a{i:03}", "a", at=i, gpus=gpus, ranks=ranks) for i in range(many)]
    assert order(*crowd, job("b", "b", at=999, ranks=9)).index("b") <= 1


def running(name: str, priority: int, cpus: int, gpus: int = 0, **facts: object) -> Running:
    return Running(name, 1, str(facts.pop("owner", "a")), priority, Need(gpus, cpus), **facts)  # type: ignore[arg-type]


def stopped(*attempts: Running, priority: int = 5, lacks: Need, scope: Scope = "owner") -> list[str]:
    return [one.job for one in PreemptionPlanner(attempts, scope).choose_victims("a", priority, lacks, lacks)]


@pytest.mark.parametrize(
    ("attempts", "lacks", "expected"),
    [
        ([running("low", 1, 2), running("lower", 0, 2)], Need(0, 2), ["lower"]),
        ([running("low", 1, 2), running("lower", 0, 2)], Need(0, 3), ["lower", "low"]),
        ([running("equal", 5, 4), running("higher", 6, 4)], Need(0, 1), []),  # equals never
        ([running("low", 0, 2), running("equal", 5, 4)], Need(0, 3), []),  # would not be enough
        (
            [running("small", 0, 1), running("large", 0, 4, unsaved_seconds=9.0)],
            Need(0, 4),
            ["large"],
        ),  # the small one goes on
        (
            [running("much", 0, 2, unsaved_seconds=9.0), running("little", 0, 2, unsaved_seconds=1.0)],
            Need(0, 2),
            ["little"],
        ),
        (
            [running("old", 0, 2, started_at=START), running("new", 0, 2, started_at=START + timedelta(1))],
            Need(0, 1),
            ["new"],
        ),
        ([running("cpu", 0, 4), running("gpu", 0, 1, gpus=1)], Need(1, 0), ["gpu"]),
        ([running("kept", 0, 4, is_protected=True)], Need(0, 1), []),
        ([running("going", 0, 2, stopping=True), running("low", 0, 2)], Need(0, 2), []),  # room is on its way
        ([running("going", 0, 2, stopping=True), running("low", 0, 2)], Need(0, 3), ["low"]),
    ],
)
def test_preemption_plan_selects_jobs_to_stop(attempts: list[Running], lacks: Need, expected: list[str]) -> None:
    assert stopped(*attempts, lacks=lacks) == expected


@pytest.mark.parametrize(("scope", "expected"), [("owner", ["own"]), ("any", ["others", "own"]), ("off", [])], ids=str)
def test_preemption_scope_limits_owners_of_stopped_jobs(scope: Scope, expected: list[str]) -> None:
    attempts = [running("others", 0, 4, owner="b"), running("own", 1, 4)]
    assert stopped(*attempts, lacks=Need(0, 4), scope=scope) == expected[:1]
    assert stopped(*attempts, lacks=Need(0, 8), scope=scope) == (expected if scope == "any" else [])
    room = PreemptionPlanner(attempts, scope)
    assert room.can_help(5) == (scope != "off") and not room.can_help(0)
    lacks = Need(0, 4)
    assert (room.choose_victims("c", 9, lacks, lacks) == ()) == (scope != "any")
    assert (room.choose_victims("a", 5, lacks, lacks) == ()) == (scope != "any"), (
        "what comes free would be kept for the one ahead"
    )


def test_preemption_is_skipped_if_freed_slots_go_to_job_ahead() -> None:
    room = PreemptionPlanner([running("low", 0, 1), running("kept", 0, 3, is_protected=True)], "owner")
    assert room.choose_victims("a", 5, Need(0, 4), Need(0, 4)) == ()  # cannot be helped
    assert (
        room.choose_victims("a", 5, Need(0, 1), Need(0, 1)) == ()
    )  # what "low" gives back would be kept for the one ahead
    other = PreemptionPlanner([running("low", 0, 1), running("gpu", 0, 0, gpus=1, is_protected=True)], "owner")
    assert other.choose_victims("a", 5, Need(1, 0), Need(1, 0)) == ()
    assert [one.job for one in other.choose_victims("a", 5, Need(0, 1), Need(0, 1))] == [
        "low"
    ]  # waits for nothing that the first does


def test_preemption_does_not_stop_same_job_for_two_waiting_jobs() -> None:
    room = PreemptionPlanner([running("big", 0, 4), running("small", 0, 1)], "owner")
    assert [one.job for one in room.choose_victims("a", 5, Need(0, 3), Need(0, 3))] == ["big"]
    assert room.choose_victims("a", 5, Need(0, 1), Need(0, 1)) == ()  # what is left of "big"
    assert room.can_help(5) and not room.can_help(0)
    assert [one.job for one in room.choose_victims("a", 5, Need(0, 1), Need(0, 1))] == ["small"]
    assert not room.can_help(5)
