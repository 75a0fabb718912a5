"""The order of the queue: a total one, owners take turns, quotas hold back their own owner alone."""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet_service.queue_order import UNLIMITED, Limit, Place, Queued, Share, in_order
from ratchet_service.queue_preemption import Room, Running, Scope
from ratchet_service.slots import Need

START = datetime(2030, 1, 1, tzinfo=UTC)


def job(name: str, owner: str = "a", *, at: int = 0, priority: int = 0, gpus: int = 0, ranks: int = 1) -> Queued:
    return Queued(name, owner, priority, START + timedelta(seconds=at), Share(gpus, ranks, 1))


def names(places: list[Place]) -> list[str]:
    return [place.queued.job + ("!" if place.over else "") for place in places]


def order(*jobs: Queued, held: dict[str, Share] | None = None, quotas: dict[str, Limit] | None = None) -> list[str]:
    limits = quotas or {}
    return names(in_order(jobs, held or {}, lambda owner: limits.get(owner, UNLIMITED)))


def test_priority_then_who_holds_least_then_age() -> None:
    assert order(job("late", at=2), job("early", at=1), job("urgent", at=3, priority=1)) == ["urgent", "early", "late"]
    both = job("a1", "a", at=1), job("b1", "b", at=2)
    assert order(*both) == ["a1", "b1"]
    assert order(*both, held={"a": Share(0, 1, 1)}) == ["b1", "a1"]
    assert order(*both, held={"a": Share(0, 1, 1), "b": Share(0, 8, 1)}) == ["a1", "b1"]
    assert order(*both, held={"a": Share(1, 1, 1), "b": Share(0, 8, 1)}) == ["b1", "a1"]  # GPUs before ranks
    assert order(*both, job("a2", "a", priority=5), held={"a": Share(8, 8, 8)}) == ["a2", "b1", "a1"]


def test_owners_take_turns_by_what_their_jobs_take() -> None:
    many = [job(f"a{i}", "a", at=i) for i in range(4)]
    assert order(*many, job("b0", "b", at=9), job("b1", "b", at=10)) == ["a0", "b0", "a1", "b1", "a2", "a3"]
    big = [job("a0", "a", at=0, ranks=3), job("a1", "a", at=1)]
    assert order(*big, *(job(f"b{i}", "b", at=5 + i) for i in range(4))) == ["a0", "b0", "b1", "b2", "a1", "b3"]


def test_a_job_for_which_another_was_stopped_goes_before_its_equals_alone() -> None:
    claiming = Queued("claims", "a", 0, START + timedelta(seconds=9), Share(0, 1, 1), claims=START)
    later = Queued(
        "later", "c", 0, START, Share(0, 1, 1), claims=START + timedelta(seconds=1)
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
def test_a_quota_holds_back_its_owner_and_nobody_else(quota: Limit, expected: list[str]) -> None:
    jobs = [job(f"a{i}", "a", at=i, ranks=2) for i in range(3)]
    held = {"a": Share(0, 2, 2)}
    assert order(*jobs, job("b0", "b", at=9, ranks=100), held=held, quotas={"a": quota}) == expected


def test_small_jobs_do_not_overtake_a_large_one_on_their_owners_quota() -> None:
    large, small, cpu = job("large", at=1, gpus=4, ranks=4), job("small", at=2, gpus=1), job("cpu", at=3)
    held, quota = {"a": Share(2, 2, 1)}, {"a": Limit(gpus=4)}
    assert order(large, small, cpu, held=held, quotas=quota) == ["large!", "small!", "cpu"]
    never = job("never", at=0, gpus=5, ranks=5)  # keeps nothing from the others
    assert order(never, small, held=held, quotas=quota) == ["never!", "small"]


def test_who_waits_for_a_quota_is_told_the_figures() -> None:
    places = in_order(
        [job("x", ranks=2), job("y", at=1), job("z", at=2, ranks=9)], {"a": Share(0, 3, 1)}, lambda _: Limit(ranks=4)
    )
    assert [place.over for place in places] == [
        "waits for its owner's quota: needs 2 ranks, 3 of 4 ranks are held",
        "waits for its owner's quota: needs 1 rank, 3 of 4 ranks are held, 2 are for jobs ahead of it",
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
def test_the_order_is_total_fair_and_within_quotas(
    drawn: list[tuple[str, int, int, int, int, bool]], held: dict[str, Share], quotas: dict[str, Limit], random: object
) -> None:
    jobs = [
        Queued(
            f"j{i}", owner, priority, START + timedelta(seconds=at), Share(gpus, ranks, 1), START if claims else None
        )
        for i, (owner, at, priority, gpus, ranks, claims) in enumerate(drawn)
    ]
    places = in_order(jobs, held, lambda owner: quotas.get(owner, UNLIMITED))
    assert sorted(p.queued.job for p in places) == sorted(j.job for j in jobs)
    shuffled = sorted(jobs, key=lambda _: random.random())  # type: ignore[attr-defined]
    assert in_order(shuffled, held, lambda owner: quotas.get(owner, UNLIMITED)) == places

    has = defaultdict(Share, held)
    for i, place in enumerate(places):
        one, behind = place.queued, [p.queued for p in places[i:]]
        assert one.priority == max(b.priority for b in behind)
        equals = [b for b in behind if b.priority == one.priority]
        if not one.claims:  # nobody who holds less is passed over, and within an owner nobody who is older
            assert not any(b.claims for b in equals)
            assert all(has[one.owner][:2] <= has[b.owner][:2] for b in equals)
        own = [b for b in equals if b.owner == one.owner and b.claims == one.claims]
        assert one.created_at == min(b.created_at for b in own)
        if place.over is None:
            has[one.owner] = has[one.owner].plus(one.takes)
            quota = quotas.get(one.owner, UNLIMITED)
            for name in ("gpus", "ranks", "jobs"):
                limit = getattr(quota, name)
                assert limit is None or not getattr(one.takes, name) or getattr(has[one.owner], name) <= limit


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 9)), max_size=12))
def test_with_one_owner_it_is_first_come_first_served(drawn: list[tuple[int, int, int]]) -> None:
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
    return [one.job for one in Room(attempts, scope).make("a", priority, lacks, lacks)]


@pytest.mark.parametrize(
    ("attempts", "lacks", "expected"),
    [
        ([running("low", 1, 2), running("lower", 0, 2)], Need(0, 2), ["lower"]),
        ([running("low", 1, 2), running("lower", 0, 2)], Need(0, 3), ["lower", "low"]),
        ([running("equal", 5, 4), running("higher", 6, 4)], Need(0, 1), []),  # equals never
        ([running("low", 0, 2), running("equal", 5, 4)], Need(0, 3), []),  # would not be enough
        ([running("small", 0, 1), running("large", 0, 4, at_risk=9.0)], Need(0, 4), ["large"]),  # the small one goes on
        ([running("much", 0, 2, at_risk=9.0), running("little", 0, 2, at_risk=1.0)], Need(0, 2), ["little"]),
        ([running("old", 0, 2, since=START), running("new", 0, 2, since=START + timedelta(1))], Need(0, 1), ["new"]),
        ([running("cpu", 0, 4), running("gpu", 0, 1, gpus=1)], Need(1, 0), ["gpu"]),
        ([running("kept", 0, 4, spared=True)], Need(0, 1), []),
        ([running("going", 0, 2, stopping=True), running("low", 0, 2)], Need(0, 2), []),  # room is on its way
        ([running("going", 0, 2, stopping=True), running("low", 0, 2)], Need(0, 3), ["low"]),
    ],
)
def test_who_is_stopped_for_whom(attempts: list[Running], lacks: Need, expected: list[str]) -> None:
    assert stopped(*attempts, lacks=lacks) == expected


@pytest.mark.parametrize(("scope", "expected"), [("owner", ["own"]), ("any", ["others", "own"]), ("off", [])], ids=str)
def test_whose_jobs_are_stopped(scope: Scope, expected: list[str]) -> None:
    attempts = [running("others", 0, 4, owner="b"), running("own", 1, 4)]
    assert stopped(*attempts, lacks=Need(0, 4), scope=scope) == expected[:1]
    assert stopped(*attempts, lacks=Need(0, 8), scope=scope) == (expected if scope == "any" else [])
    room = Room(attempts, scope)
    assert room.helps(5) == (scope != "off") and not room.helps(0)
    lacks = Need(0, 4)
    assert (room.make("c", 9, lacks, lacks) == ()) == (scope != "any")
    assert (room.make("a", 5, lacks, lacks) == ()) == (scope != "any"), (
        "what comes free would be kept for the one ahead"
    )


def test_nobody_is_stopped_for_a_job_whose_room_others_would_take() -> None:
    room = Room([running("low", 0, 1), running("kept", 0, 3, spared=True)], "owner")
    assert room.make("a", 5, Need(0, 4), Need(0, 4)) == ()  # cannot be helped
    assert room.make("a", 5, Need(0, 1), Need(0, 1)) == ()  # what "low" gives back would be kept for the one ahead
    other = Room([running("low", 0, 1), running("gpu", 0, 0, gpus=1, spared=True)], "owner")
    assert other.make("a", 5, Need(1, 0), Need(1, 0)) == ()
    assert [one.job for one in other.make("a", 5, Need(0, 1), Need(0, 1))] == [
        "low"
    ]  # waits for nothing that the first does


def test_two_that_wait_do_not_stop_the_same_job_twice() -> None:
    room = Room([running("big", 0, 4), running("small", 0, 1)], "owner")
    assert [one.job for one in room.make("a", 5, Need(0, 3), Need(0, 3))] == ["big"]
    assert room.make("a", 5, Need(0, 1), Need(0, 1)) == ()  # what is left of "big"
    assert room.helps(5) and not room.helps(0)
    assert [one.job for one in room.make("a", 5, Need(0, 1), Need(0, 1))] == ["small"]
    assert not room.helps(5)
