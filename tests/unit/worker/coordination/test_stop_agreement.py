"""Ranks agree on one stop step over a real TCPStore, whatever the timing; each rank is a thread with clients of its own."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import pytest
import torch.distributed as dist

from ratchet_contract.phases import Cause
from ratchet_worker.coordination.stop_agreement import (
    FINISH,
    Agreement,
    Decision,
    StopRequests,
    decide,
    position,
)
from ratchet_worker.coordination.store_exchange import Abandoned, Exchange, PeerTimeout, poll_until_present

EVALUATION = 1  # the first evaluation after a step

WAIT = 20.0


@dataclass
class Inbox:
    """What one rank hears; ``listen`` is what an Agreement takes."""

    wish: StopRequests = field(default_factory=StopRequests)
    news: threading.Event = field(default_factory=threading.Event)

    def tell(self, wish: StopRequests) -> None:
        self.wish = wish
        self.news.set()

    def listen(self, seconds: float) -> StopRequests:
        self.news.wait(min(seconds, 0.005))
        self.news.clear()
        return self.wish


class Group:
    """``n`` ranks on one store server."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.inboxes = [Inbox() for _ in range(n)]
        self.idle: list[tuple[int, Decision]] = []
        self.agreements = [
            Agreement(
                self.client(), r, n, self.inboxes[r].listen, lambda decision, r=r: self.idle.append((r, decision))
            )
            for r in range(n)
        ]

    def client(self) -> dist.TCPStore:
        return dist.TCPStore("127.0.0.1", self.server.port, is_master=False, timeout=timedelta(seconds=WAIT))

    def start(self) -> None:
        for agreement in self.agreements:
            agreement.start()

    def run(self, main: Callable[[int], object]) -> list[object]:
        """``main(rank)`` in a thread per rank; returns their results, raises what one raised."""
        results: list[object] = [None] * self.n
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = main(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        alive = [t for t in threads if t.is_alive()]
        for agreement in self.agreements:
            agreement.close()
        assert not errors, errors
        assert not alive, "a rank hangs"
        return results


@pytest.fixture
def group() -> Group:
    return Group(3)


def test_drifting_ranks_stop_at_the_same_step_and_none_goes_beyond_it() -> None:
    """No collective holds the ranks together; the stop reaches one rank at a random step."""
    for seed in range(6):
        group = Group(3)
        group.start()
        draw = random.Random(seed)
        stop_at, who = draw.randint(1, 60), draw.randrange(3)

        def main(rank: int, group: Group = group, stop_at: int = stop_at, who: int = who, seed: int = seed) -> object:
            agreement, pace, done = group.agreements[rank], random.Random(seed * 10 + rank), 0
            while done < 5000:
                if (decision := agreement.begin(position(done + 1))) is not None:
                    return done, decision
                threading.Event().wait(pace.random() * 0.002 * (1 + rank))
                done += 1
                if rank == who and done == stop_at:
                    group.inboxes[rank].tell(StopRequests(stop=Cause.SIGTERM))
            return done, None

        results = group.run(main)
        assert len(set(results)) == 1, results
        done, decision = results[0]  # type: ignore[misc]
        assert decision.stop is Cause.SIGTERM and decision.target == position(done) and stop_at <= done < 5000


def test_failing_rank_waits_for_pending_stop_decision(group: Group) -> None:
    """Another rank may have left for it already, which is what failed here."""
    assert not group.agreements[0].is_stopped_early(WAIT)  # no round is open: no waiting
    for rank in (0, 1):
        group.agreements[rank].start()
    group.inboxes[0].tell(StopRequests(stop=Cause.API_PREEMPT))
    store = group.client()
    for _ in poll_until_present(store, ["freeze/0/0", "freeze/0/1"]):
        pass
    late = threading.Timer(0.05, group.agreements[2].start)
    late.start()
    assert group.agreements[0].is_stopped_early(WAIT)
    assert group.agreements[1].is_stopped_early(WAIT)
    for agreement in group.agreements:
        agreement.close()


def test_checkpoint_requests_and_stop_are_agreed_in_separate_rounds(group: Group) -> None:
    group.start()
    plan = [
        (20, StopRequests(requests=1)),
        (45, StopRequests(requests=2)),
        (80, StopRequests(stop=Cause.API_SUSPEND, requests=2)),
    ]

    def main(rank: int) -> object:
        agreement, done, acts = group.agreements[rank], 0, []
        left = [*plan] if rank == 1 else []
        while done < 20_000:
            decision = agreement.begin(position(done + 1))
            if decision is None:
                threading.Event().wait(0.0005 * (rank + 1))
                done += 1
                # Behind the round before: of two wishes that come while nobody listens the later one alone is heard.
                if left and done >= left[0][0] and len(acts) == len(plan) - len(left):
                    group.inboxes[rank].tell(left.pop(0)[1])
                continue
            acts.append((done, decision.stop))
            if decision.stop is not None:
                return acts
            agreement.resolve(decision)
        return acts

    results = group.run(main)
    assert results[0] == results[1] == results[2]
    assert [stop for _, stop in results[0]] == [None, None, Cause.API_SUSPEND]  # type: ignore[union-attr]


def test_conflicting_stop_requests_agree_on_one_cause(group: Group) -> None:
    group.inboxes[0].tell(StopRequests(stop=Cause.SIGTERM))
    group.inboxes[2].tell(StopRequests(stop=Cause.API_CANCEL))
    published = [
        (position(3), StopRequests(Cause.SIGTERM)),
        (position(4), StopRequests()),
        (position(3), StopRequests(Cause.API_CANCEL)),
    ]
    assert decide(0, published) == Decision(0, position(4), Cause.API_CANCEL)
    group.start()
    causes = set()
    for rank, decision in _idle(group):
        causes.add(decision)
        assert rank in range(3)
    group.run(lambda rank: None)
    assert len(causes) == 1


def _idle(group: Group) -> list[tuple[int, Decision]]:
    deadline = threading.Event()
    for _ in range(int(WAIT * 100)):
        if len(group.idle) == group.n:
            return group.idle
        deadline.wait(0.01)
    raise AssertionError(f"only {group.idle} heard of the stop")


def test_stop_before_first_step_is_agreed_without_main_threads(group: Group) -> None:
    group.start()
    group.inboxes[1].tell(StopRequests(stop=Cause.API_PREEMPT))
    assert {(r, d.target, d.stop) for r, d in _idle(group)} == {(r, 0, Cause.API_PREEMPT) for r in range(3)}
    results = group.run(lambda rank: group.agreements[rank].begin(position(1)))
    assert all(isinstance(d, Decision) and d.stop is Cause.API_PREEMPT for d in results)


def test_stop_during_evaluation_is_agreed_at_common_position(group: Group) -> None:
    """Ranks 1 and 2 evaluate after step 5; rank 0 only begins its evaluation: all do that and then abandon it."""
    group.start()
    entered = threading.Barrier(3)

    def main(rank: int) -> object:
        agreement = group.agreements[rank]
        for step in range(1, 6):
            assert agreement.begin(position(step)) is None
        if rank == 0:
            entered.wait(WAIT)
            group.inboxes[0].tell(StopRequests(stop=Cause.SIGTERM))
            while not agreement.received_requests.stop:
                threading.Event().wait(0.001)
        assert agreement.begin(position(5, EVALUATION)) is None
        if rank != 0:
            entered.wait(WAIT)
        while (decision := agreement.pending()) is None:
            threading.Event().wait(0.001)
        assert agreement.begin(position(6)) == decision
        return decision

    results = group.run(main)
    assert set(results) == {Decision(0, position(5, EVALUATION), Cause.SIGTERM)}


def test_stop_after_one_rank_began_to_finish_lets_all_finish(group: Group) -> None:
    group.start()

    def main(rank: int) -> object:
        agreement = group.agreements[rank]
        assert agreement.begin(position(9)) is None
        if rank == 0:
            assert agreement.begin(position(9, FINISH)) is None
            group.inboxes[0].tell(StopRequests(stop=Cause.SIGTERM))
            return "finished"
        while not group.server.check(["freeze/0/open"]):
            threading.Event().wait(0.001)
        return "finished" if agreement.begin(position(9, FINISH)) is None else "stopped"

    assert group.run(main) == ["finished"] * 3


def test_lost_store_raises_in_main_thread_instead_of_hanging(group: Group) -> None:
    def broken(seconds: float) -> StopRequests:
        raise ConnectionError("the store is gone")

    agreement = Agreement(group.client(), 0, 3, broken)
    agreement._limit = 0  # a round is open
    agreement.start()
    with pytest.raises(ConnectionError, match="gone"):
        agreement.begin(position(1))
    agreement.close()


def test_exchange_gathers_in_rank_order_and_names_missing_ranks(group: Group) -> None:
    def main(rank: int) -> object:
        exchange = Exchange(group.client(), rank, 3, timeout=WAIT)
        assert exchange.gather("a", {"from": rank}) == [{"from": r} for r in range(3)]
        assert exchange.broadcast("b", "of-0" if rank == 0 else None) == "of-0"
        if rank != 2:
            exchange.post("c", rank)
        exchange.gather("posted", None)  # else the slower one of the two may be missing, too
        if rank == 2:
            return None
        with pytest.raises(PeerTimeout, match=r"rank \[2\]"):
            exchange.gather("c", rank, timeout=0.3)
        with pytest.raises(Abandoned):
            exchange.gather("d", rank, should_abandon=lambda: True)
        return None

    group.run(main)
    client = group.client()
    Exchange(client, 0, 3, WAIT).delete("a")
    assert not client.check(["exchange/a/0"])
    assert json.loads(client.get("exchange/b/0")) == "of-0"
