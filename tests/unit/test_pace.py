"""Deadlines that are learned: no healthy pace is taken for a hang, and every hang is found. No process, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ratchet_contract.deadlines import (
    CEILING,
    DEFAULT_STEP,
    ENOUGH,
    FACTOR,
    FLOOR,
    SETTLED_SECONDS,
    Deadlines,
    Pace,
    deadlines,
    joined,
)
from ratchet_contract.spec_policy import PolicySpec
from ratchet_worker.counter import Reading, Stage
from ratchet_worker.pace import Learner
from ratchet_worker.watch import Stuck, Watch

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
        self.watch.look(self.now)
        self.found = self.found or self.watch.stuck(self.readings, lambda _: False, self.now)

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
    run.train(1.0, *[silence] * max(ENOUGH + 1, int(SETTLED_SECONDS / silence) + 2))
    return run


@settings(max_examples=60, deadline=None)
@given(base=st.floats(0.5, 250), jitter=st.lists(st.floats(0, 1), min_size=10, max_size=40), ranks=st.integers(1, 3))
def test_a_pace_of_bounded_jitter_is_never_a_hang_and_a_stop_always_is(
    base: float, jitter: list[float], ranks: int
) -> None:
    """Silences from ``base`` to just under ten times that, and under the static deadline, in any order."""
    most = min(0.99 * FACTOR * base, 0.99 * DEFAULT_STEP)
    run = Run(ranks=ranks)
    run.train(1.0)
    while run.now < SETTLED_SECONDS + 300 or run.step < 2 * ENOUGH:
        for share in jitter:
            run.train(base + share * max(0.0, most - base))
            assert run.found is None, (run.found, run.deadline())
    since, deadline = run.now, run.deadline()
    assert deadline <= DEFAULT_STEP
    found = run.wait(deadline + 2 * LOOK)
    assert found is not None and found.ranks == tuple(range(ranks))
    assert run.now - since <= deadline + 2 * LOOK


def test_a_quick_job_learns_a_short_deadline_and_says_so() -> None:
    run = settled(Run(), 0.5)
    assert run.deadline() == FLOOR
    found = run.wait(200)
    assert found is not None and "step_deadline (120 s, learned: the longest silence before was 0.5 s)" in found.message
    assert "still for 12" in found.message


def test_ranks_that_are_silent_together_have_shown_one_silence() -> None:
    """Eight ranks that save four times have not shown how long saves take."""
    run = settled(Run(ranks=8), 0.5)
    for _ in range(5):
        for rank in range(8):
            run.move(rank, stage=Stage.CHECKPOINTING)
        run.wait(2)
        for rank in range(8):
            run.move(rank, stage=Stage.TRAINING)
    assert run.deadline(Stage.CHECKPOINTING) == DEFAULT_STEP


def test_what_is_given_is_not_learned() -> None:
    run = settled(Run(policy=PolicySpec(step_deadline=77)), 0.5)
    assert run.deadline() == 77 and run.learner.pace(hung=False) is not None


def test_until_enough_was_seen_the_static_deadline_holds() -> None:
    run = Run()
    run.train(*[0.1] * 1000)  # 100 s of quick steps, then a data set's end
    assert run.deadline() == DEFAULT_STEP
    run.train(280)
    assert run.found is None and run.deadline() == DEFAULT_STEP


def test_the_first_step_is_start_up_and_not_part_of_the_pace() -> None:
    run = settled(Run(), 5.0)
    slow = Run()
    slow.train(250)
    assert slow.found is None
    slow.train(*[5.0] * 800)
    assert slow.deadline() == run.deadline() == FLOOR
    pace = slow.learner.pace(hung=False)
    assert pace is not None and pace.startup == pytest.approx(250, abs=LOOK) and pace.silences["training"] < 6


def test_the_first_evaluation_is_not_measured_and_has_the_static_deadline() -> None:
    run = settled(Run(), 0.5)
    run.move(0, stage=Stage.EVALUATING)
    assert run.wait(250) is None
    run.move(0)
    run.move(0, stage=Stage.TRAINING)
    assert run.deadline(Stage.EVALUATING) == DEFAULT_STEP
    run.move(0, stage=Stage.EVALUATING)
    for _ in range(ENOUGH + 1):
        run.wait(17)
        run.move(0)
    assert run.deadline(Stage.EVALUATING) == pytest.approx(FACTOR * 17)
    assert run.deadline() == FLOOR


@pytest.mark.parametrize("batches", [50, 300])
def test_who_waits_for_a_rank_behind_it_shows_nothing_of_its_own_pace(batches: int) -> None:
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


def test_an_earlier_attempts_pace_only_lengthens() -> None:
    quick = Run(Pace(startup=3, silences={"training": 0.2}))
    assert (quick.deadline(), quick.learner.deadlines.startup) == (DEFAULT_STEP, 300)  # another pace may follow
    assert settled(Run(Pace(silences={"training": 19})), 0.5).deadline() == 190
    slow = Run(Pace(silences={"training": 250}))
    assert slow.deadline() == 500
    slow.train(1.0, 450)
    assert slow.found is None


def test_after_a_hang_nothing_is_shortened() -> None:
    """Was that a false alarm, it does not come again."""
    run = Run(Pace(startup=3, silences={"training": 0.2}, hung=True))
    assert run.learner.deadlines.startup == 300
    assert settled(run, 0.5).deadline() == DEFAULT_STEP


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
        ({}, Pace(startup=1e6, silences={"training": 1e6}), Deadlines(CEILING, CEILING, CEILING, True)),
    ],
)
def test_an_attempts_deadlines(policy: dict[str, Any], pace: Pace | None, expected: Deadlines) -> None:
    assert deadlines(PolicySpec(**policy), pace) == expected


def test_paces_are_joined_by_the_longer_and_the_later_one() -> None:
    one = Pace(startup=5, silences={"training": 3, "evaluating": 1}, hung=True)
    two = Pace(silences={"training": 2, "checkpointing": 4})
    assert joined(one, two) == Pace(startup=5, silences={"training": 3, "evaluating": 1, "checkpointing": 4})
    assert joined(None, one) == joined(one, None) == one and joined(None, None) is None
    both = joined(two, one)
    assert both is not None and both.hung
