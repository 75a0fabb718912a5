"""What counts as a rank's own time in a step."""

from __future__ import annotations

import pytest

from ratchet_worker.training import step_times
from ratchet_worker.training.step_times import StepClock


class Hand:
    """A clock that is set by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def hand(monkeypatch: pytest.MonkeyPatch) -> Hand:
    made = Hand()
    monkeypatch.setattr(step_times, "time", made)
    return made


def step(clock: StepClock, hand: Hand, load: float, wait: float, ready: float, rest: float) -> None:
    """One step: ``load`` seconds before the boundary that begins it, ``wait`` in that boundary."""
    hand.now += load
    clock.enter_boundary()
    hand.now += wait
    clock.leave_boundary()
    hand.now += ready
    first_bucket_at = hand.now
    hand.now += rest
    clock.end_step(first_bucket_at)
    hand.now += 50  # a save
    clock.begin_step()


def test_loading_counts_and_waits_at_boundaries_do_not(hand: Hand) -> None:
    clock = StepClock()
    assert clock.take() is None
    step(clock, hand, 7, 30, 2, 1)  # nothing is known of what came before the first step
    times = clock.take()
    assert times is not None and (times.ready, times.step) == (2, 3)
    for load in (1, 5, 4):
        step(clock, hand, load, 30, 2, 1)
    times = clock.take()
    assert times is not None and (times.ready, times.step) == (6, 7)
    assert clock.take() is None


def test_batch_that_is_loaded_within_a_step_counts_to_the_next(hand: Hand) -> None:
    clock = StepClock()
    clock.begin_step()
    hand.now += 2
    first_bucket_at = hand.now
    hand.now += 1
    with clock.loading_ahead():
        hand.now += 9
    clock.end_step(first_bucket_at)
    clock.begin_step()
    times = clock.take()
    assert times is not None and (times.ready, times.step) == (2, 3)
    step(clock, hand, 0, 0, 2, 1)
    times = clock.take()
    assert times is not None and (times.ready, times.step) == (11, 12)


def test_step_after_an_evaluation_counts_from_its_own_beginning_and_one_with_an_evaluation_not_at_all(
    hand: Hand,
) -> None:
    clock = StepClock()
    clock.begin_step()
    clock.leave_out_step()
    step(clock, hand, 500, 0, 2, 1)
    times = clock.take()
    assert times is not None and times.ready == 2
    clock.leave_out_step()
    clock.end_step(hand.now + 1)
    assert clock.take() is None


def test_step_without_a_backward_pass_is_left_out(hand: Hand) -> None:
    clock = StepClock()
    clock.begin_step()
    clock.end_step(hand.now - 10)  # the hook was last called in an earlier step
    assert clock.take() is None
