"""Deadlines by step counters, and the merging of wishes: no process, no clock."""

from __future__ import annotations

from ratchet_contract.phases import Cause, Desired
from ratchet_contract.protocol.messages import Control
from ratchet_contract.protocol.timing import Deadlines
from ratchet_worker.agent.desired_state import DesiredState
from ratchet_worker.agent.hang_detector import Learner, Stuck, Watch
from ratchet_worker.ipc.progress_counter import Reading, Stage

GIVEN = Deadlines(startup=100, rendezvous=100, step=10, learns=False)


class Bench:
    """A watch over counters that the test sets; one look per second."""

    def __init__(self, ranks: int) -> None:
        self.readings: dict[int, Reading | None] = dict.fromkeys(range(ranks))
        readers = {rank: (lambda r=rank: self.readings[r]) for rank in self.readings}
        self.watch = Watch(readers, Learner(GIVEN), now=0.0)
        self.stopped: set[int] = set()
        self.now = 0.0

    def set(self, rank: int, ticks: int, started: int, finished: int, stage: Stage = Stage.TRAINING) -> None:
        self.readings[rank] = Reading(ticks, started, finished, stage)

    def run(self, seconds: int) -> Stuck | None:
        """Look every second; what was found first, if anything."""
        for _ in range(seconds):
            self.now += 1.0
            self.watch.poll(self.now)
            found = self.watch.find_stuck(self.readings, self.stopped.__contains__, self.now)
            if found is not None:
                return found
        return None


def test_step_deadline_counts_only_after_every_rank_has_begun() -> None:
    bench = Bench(2)
    bench.set(0, 2, 1, 1)
    bench.set(1, 1, 0, 0, Stage.STARTUP)
    assert bench.run(90) is None  # rank 0 waits, rank 1 loads: start-up
    found = bench.run(20)
    assert found is not None and found.ranks == (1,) and "startup_deadline" in found.message
    bench.set(1, 2, 1, 1)
    assert bench.run(9) is None
    found = bench.run(5)
    assert found is not None and found.ranks == (0, 1) and "step_deadline" in found.message


def test_startup_deadline_counts_from_rank_start() -> None:
    bench = Bench(2)
    bench.now = 500.0
    bench.watch.begin(bench.now)
    assert bench.run(90) is None
    found = bench.run(20)
    assert found is not None and found.ranks == (0, 1) and (found.halted, found.since) == (False, 500.0)


def test_stopped_rank_is_distinguished_from_waiting_ranks() -> None:
    bench = Bench(2)
    for rank in range(2):
        bench.set(rank, 2, 1, 1)
    bench.stopped.add(1)
    found = bench.run(20)
    assert found is not None and (found.ranks, found.halted, found.since) == ((1,), True, 1.0)


def test_rank_waiting_for_progressing_remote_rank_is_not_hung() -> None:
    """Rank 0, on another node, evaluates alone; then it is stopped, and nothing of it can be seen to move."""
    bench = Bench(2)
    far = Reading(2, 1, 1, Stage.EVALUATING)
    own = {1: lambda: bench.readings[1]}
    bench.watch = Watch(own, Learner(GIVEN), now=0.0, other_readers={0: lambda: far})
    bench.readings = {1: Reading(2, 1, 1, Stage.TRAINING)}
    for second in range(60):
        far = far._replace(ticks=far.ticks + second % 2)
        assert bench.run(1) is None
    assert bench.run(9) is None
    found = bench.run(5)
    assert found is not None and found.ranks == (1,)


def test_rank_behind_progressing_remote_rank_is_hung() -> None:
    bench = Bench(2)
    own = {1: lambda: bench.readings[1]}
    ahead = Reading(0, 9, 9, Stage.TRAINING)
    bench.watch = Watch(own, Learner(GIVEN), now=0.0, other_readers={0: lambda: ahead})
    bench.readings = {1: Reading(2, 1, 1, Stage.TRAINING)}
    for _ in range(10):
        ahead = ahead._replace(ticks=ahead.ticks + 1)
        assert bench.run(1) is None
    ahead = ahead._replace(ticks=ahead.ticks + 1)
    assert bench.run(2) is not None


def test_unmanaged_script_has_no_deadline_until_session_starts() -> None:
    bench = Bench(2)
    for rank in range(2):
        bench.set(rank, 1, 0, 0, Stage.UNMANAGED)
    assert bench.run(500) is None and bench.watch.ready and bench.watch.has_progressed_since(400.0)
    bench.set(0, 2, 0, 0, Stage.STARTUP)
    assert bench.run(90) is None and not bench.watch.ready
    found = bench.run(20)
    assert found is not None and found.ranks == (0,) and "startup_deadline" in found.message
    bench.set(0, 3, 1, 1)
    found = bench.run(20)
    assert found is not None and found.ranks == (0,) and "step_deadline" in found.message


def test_any_tick_counts_as_progress() -> None:
    bench = Bench(1)
    for ticks in range(1, 10):
        bench.set(0, ticks, 5, 4, Stage.EVALUATING)
        assert bench.run(9) is None
    assert bench.run(3) is not None


def test_hang_names_rank_behind_or_stopped() -> None:
    bench = Bench(3)
    for rank, started in enumerate((8, 7, 8)):
        bench.set(rank, 20, started, 7)
    bench.watch.poll(0.0)
    found = bench.run(15)
    assert found is not None and found.ranks == (1,)
    bench.stopped = {2}
    found = bench.run(1)
    assert found is not None and found.ranks == (2,) and "SIGSTOP" in found.message


def test_rank_waiting_for_progressing_rank_is_not_hung() -> None:
    """Rank 0 evaluates alone while rank 1 waits in the next step's collective; then rank 1 stands still for itself."""
    bench = Bench(2)
    bench.set(1, 20, 8, 7)
    for ticks in range(20, 60):
        bench.set(0, ticks, 7, 7, Stage.EVALUATING)
        assert bench.run(1) is None
    for step in range(9, 22):  # a deadline after the last moment that it waited
        bench.set(0, 100 + step, step, step - 1)
        found = bench.run(1)
        if found is not None:
            break
    assert found is not None and found.ranks == (1,)


def test_agent_suspension_is_not_counted_as_hang() -> None:
    bench = Bench(1)
    bench.set(0, 2, 1, 1)
    bench.run(1)
    bench.now += 1000
    assert bench.run(5) is None
    assert bench.run(10) is not None


def test_ended_ranks_are_ignored_by_hang_detector() -> None:
    bench = Bench(2)
    bench.set(0, 2, 1, 1)
    bench.set(1, 2, 1, 1)
    bench.watch.poll(0.0)
    bench.watch.poll(1.0)
    assert bench.watch.find_stuck([], bench.stopped.__contains__, 500.0) is None
    found = bench.watch.find_stuck([1], bench.stopped.__contains__, 500.0)
    assert found is not None and found.ranks == (1,)


def test_desired_state_merge_keeps_strongest_stop_request() -> None:
    wishes = DesiredState()
    assert wishes.merged() == Control()
    wishes.update_from_signal(Cause.SIGTERM)
    assert wishes.merged() == Control(desired=Desired.PREEMPT, cause=Cause.SIGTERM)
    wishes.update_from_service(Control(desired=Desired.PREEMPT, checkpoint_request=1))
    assert wishes.merged() == Control(desired=Desired.PREEMPT, cause=Cause.API_PREEMPT, checkpoint_request=1)
    wishes.update_from_service(Control(desired=Desired.SUSPEND))
    assert wishes.merged().cause is Cause.API_SUSPEND
    wishes.update_from_service(Control(desired=Desired.RUN))  # ranks may have agreed on a step by now
    assert wishes.merged().cause is Cause.API_SUSPEND
    wishes.update_from_service(
        Control(desired=Desired.PREEMPT, cause=Cause.API_PREEMPT)
    )  # resumed while it was stopping
    assert wishes.merged() == Control(desired=Desired.PREEMPT, cause=Cause.API_PREEMPT, checkpoint_request=1)
    wishes.update_from_service(Control(desired=Desired.CANCEL))
    assert wishes.merged().desired is Desired.CANCEL


def test_desired_state_merge_keeps_checkpoint_request_with_signal() -> None:
    wishes = DesiredState()
    wishes.update_from_service(Control(checkpoint_request=3))
    assert wishes.merged() == Control(checkpoint_request=3)
    wishes.update_from_signal(Cause.SIGTERM)
    assert wishes.merged() == Control(desired=Desired.PREEMPT, cause=Cause.SIGTERM, checkpoint_request=3)


def test_the_first_signal_names_the_cause() -> None:
    wishes = DesiredState()
    wishes.update_from_signal(Cause.TIME_LIMIT)
    wishes.update_from_signal(Cause.SIGTERM)
    assert wishes.merged() == Control(desired=Desired.PREEMPT, cause=Cause.TIME_LIMIT)
