"""Deadlines that are learned: no healthy pace is taken for a hang, and every hang is found. No process, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet_contract.protocol.timing import (
    DEFAULT_STEP_SECONDS,
    MAX_DEADLINE_SECONDS,
    MIN_DEADLINE_SECONDS,
    MIN_OBSERVATIONS,
    SETTLED_SECONDS,
    SILENCE_FACTOR,
    Deadlines,
    Pace,
    deadlines,
    merge_paces,
)
from ratchet_contract.spec.policy import PolicySpec
from ratchet_worker.agent.hang_detector import Learner, Stuck, Watch
from ratchet_worker.ipc.progress_counter import Reading, Stage

LOOK = 4.9  # seconds; less than the pause that a watch takes for a stop of its own machine


class Run:
    """Ranks in lock step, each of which begins when all of them have finished; time jumps from look to look."""

    def __init__(self, pace: Pace | None = None, ranks: int = 1, policy: PolicySpec = PolicySpec()) -> None:
        self.learner = Learner(deadlines(policy, pace), pace)
        self.readings = {rank: Reading(1, 1, 0, Stage.TRAINING) for rank in range(ranks)}
        self.watch = Watch({r: (lambda r=r: self.readings[r]) for r in self.readings}, self.learner, now=0.0)
        self.now, self.step = 0.0, 1
        self.found: Stuck | None = None

    def wait(self, seconds: float) -> Stuck | None:
        """Nobody moves. What was found meanwhile."""
        until = self.now + seconds
        while self.now < until and self.found is None:
            self.now = min(until, self.now + LOOK)
            self._look()
        return self.found

    def _look(self) -> None:
        self.watch.poll(self.now)
        self.found = self.found or self.watch.find_stuck(self.readings, lambda _: False, self.now)

    def move(self, rank: int, **changes: Any) -> None:
        before = self.readings[rank]
        self.readings[rank] = before._replace(ticks=before.ticks + 1, **changes)
        self._look()

    def train(self, *silences: float) -> None:
        """Steps that take so long, on all ranks."""
        for seconds in silences:
            self.wait(seconds)
            for rank in self.readings:
                self.move(rank, started=self.step + 1, finished=self.step)
            self.step += 1

    def deadline(self, stage: Stage = Stage.TRAINING) -> float:
        return self.learner.deadline(stage)


def settled(run: Run, silence: float = 10.0) -> Run:
    run.train(1.0, *[silence] * max(MIN_OBSERVATIONS + 1, int(SETTLED_SECONDS / silence) + 2))
    return run


@settings(max_examples=60, deadline=None)
@given(base=st.floats(0.5, 250), jitter=st.lists(st.floats(0, 1), min_size=10, max_size=40), ranks=st.integers(1, 3))
def test_learned_deadline_tolerates_jitter_and_detects_every_stop(base: float, jitter: list[float], ranks: int) -> None:
    """Silences from ``base`` to just under ten times that, and under the static deadline, in any order."""
    most = min(0.99 * SILENCE_FACTOR * base, 0.99 * DEFAULT_STEP_SECONDS)
    run = Run(ranks=ranks)
    run.train(1.0)
    while run.now < SETTLED_SECONDS + 300 or run.step < 2 * MIN_OBSERVATIONS:
        for share in jitter:
            run.train(base + share * max(0.0, most - base))
            assert run.found is None, (run.found, run.deadline())
    since, deadline = run.now, run.deadline()
    assert deadline <= DEFAULT_STEP_SECONDS
    found = run.wait(deadline + 2 * LOOK)
    assert found is not None and found.ranks == tuple(range(ranks))
    assert run.now - since <= deadline + 2 * LOOK


def test_learned_deadline_of_fast_job_is_floor_and_is_reported() -> None:
    run = settled(Run(), 0.5)
    assert run.deadline() == MIN_DEADLINE_SECONDS
    found = run.wait(200)
    assert found is not None and "step_deadline (120 s; the longest pause so far was 0.5 s)" in found.message
    assert "silent for 12" in found.message


def test_simultaneous_silences_of_ranks_count_once() -> None:
    """Eight ranks that save four times have not shown how long saves take."""
    run = settled(Run(ranks=8), 0.5)
    for _ in range(5):
        for rank in range(8):
            run.move(rank, stage=Stage.CHECKPOINTING)
        run.wait(2)
        for rank in range(8):
            run.move(rank, stage=Stage.TRAINING)
    assert run.deadline(Stage.CHECKPOINTING) == DEFAULT_STEP_SECONDS


def test_specified_step_deadline_is_not_learned() -> None:
    run = settled(Run(policy=PolicySpec(step_deadline=77)), 0.5)
    assert run.deadline() == 77 and run.learner.pace(hung=False) is not None


def test_static_deadline_applies_until_enough_observations() -> None:
    run = Run()
    run.train(*[0.1] * 1000)  # 100 s of quick steps, then a data set's end
    assert run.deadline() == DEFAULT_STEP_SECONDS
    run.train(280)
    assert run.found is None and run.deadline() == DEFAULT_STEP_SECONDS


def test_first_step_counts_as_startup_not_as_pace() -> None:
    run = settled(Run(), 5.0)
    slow = Run()
    slow.train(250)
    assert slow.found is None
    slow.train(*[5.0] * 800)
    assert slow.deadline() == run.deadline() == MIN_DEADLINE_SECONDS
    pace = slow.learner.pace(hung=False)
    assert pace is not None and pace.startup == pytest.approx(250, abs=LOOK) and pace.silences["training"] < 6


def test_the_first_evaluation_is_not_measured_and_has_the_static_deadline() -> None:
    run = settled(Run(), 0.5)
    run.move(0, stage=Stage.EVALUATING)
    assert run.wait(250) is None
    run.move(0)
    run.move(0, stage=Stage.TRAINING)
    assert run.deadline(Stage.EVALUATING) == DEFAULT_STEP_SECONDS
    run.move(0, stage=Stage.EVALUATING)
    for _ in range(MIN_OBSERVATIONS + 1):
        run.wait(17)
        run.move(0)
    assert run.deadline(Stage.EVALUATING) == pytest.approx(SILENCE_FACTOR * 17)
    assert run.deadline() == MIN_DEADLINE_SECONDS


@pytest.mark.parametrize("batches", [50, 300])
def test_rank_waiting_for_slower_rank_does_not_affect_own_pace(batches: int) -> None:
    """Rank 0 evaluates alone for up to 20 minutes, with a batch every 4 s; rank 1 has begun the next step and waits. When that
    step is done, rank 0 is seen to be further for a moment."""
    run = Run(ranks=2)
    run.train(*[1.0] * 30)
    run.move(0, started=run.step - 1, stage=Stage.EVALUATING)
    for _ in range(batches):
        run.wait(4)
        run.move(0)
    run.move(0, started=run.step, stage=Stage.TRAINING)
    run.train(1.0)
    assert run.found is None
    pace = run.learner.pace(hung=False)
    assert pace is not None and pace.silences["training"] <= 4, pace


def test_pace_of_earlier_attempt_only_lengthens_deadlines() -> None:
    quick = Run(Pace(startup=3, silences={"training": 0.2}))
    assert (quick.deadline(), quick.learner.deadlines.startup) == (DEFAULT_STEP_SECONDS, 300)  # another pace may follow
    assert settled(Run(Pace(silences={"training": 19})), 0.5).deadline() == 190
    slow = Run(Pace(silences={"training": 250}))
    assert slow.deadline() == 500
    slow.train(1.0, 450)
    assert slow.found is None


def test_deadlines_are_not_shortened_after_a_hang() -> None:
    """Was that a false alarm, it does not come again."""
    run = Run(Pace(startup=3, silences={"training": 0.2}, hung=True))
    assert run.learner.deadlines.startup == 300
    assert settled(run, 0.5).deadline() == DEFAULT_STEP_SECONDS


@pytest.mark.parametrize(
    ("policy", "pace", "expected"),
    [
        ({}, None, Deadlines(300, 300, 300, True)),
        ({"startup_deadline": 5}, None, Deadlines(5, 5, 300, True)),
        ({"step_deadline": 5}, Pace(silences={"training": 290}), Deadlines(300, 300, 5, False)),
        ({}, Pace(startup=1), Deadlines(300, 300, 300, True)),
        ({}, Pace(startup=20), Deadlines(300, 300, 300, True)),
        ({}, Pace(startup=200), Deadlines(400, 400, 300, True)),
        ({}, Pace(startup=20, hung=True), Deadlines(300, 300, 300, False)),
        ({}, Pace(silences={"training": 1, "evaluating": 200}), Deadlines(300, 300, 400, True)),
        (
            {},
            Pace(startup=1e6, silences={"training": 1e6}),
            Deadlines(MAX_DEADLINE_SECONDS, MAX_DEADLINE_SECONDS, MAX_DEADLINE_SECONDS, True),
        ),
    ],
)
def test_attempt_deadlines_follow_policy_and_pace(
    policy: dict[str, Any], pace: Pace | None, expected: Deadlines
) -> None:
    assert deadlines(PolicySpec(**policy), pace) == expected


def test_joined_pace_takes_longer_silences_and_later_hang_flag() -> None:
    one = Pace(startup=5, silences={"training": 3, "evaluating": 1}, hung=True)
    two = Pace(silences={"training": 2, "checkpointing": 4})
    assert merge_paces(one, two) == Pace(startup=5, silences={"training": 3, "evaluating": 1, "checkpointing": 4})
    assert merge_paces(None, one) == merge_paces(one, None) == one and merge_paces(None, None) is None
    both = merge_paces(two, one)
    assert both is not None and both.hung
