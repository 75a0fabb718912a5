"""Which steps are saved: by steps, by time, by a share of the time; on a clock of the test's own."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_worker.checkpoint.schedule import Schedule, early_due, first_due


class Run:
    """Steps of a loop that asks as ``Checkpointer`` does. ``step_seconds`` may depend on the step; a save costs ``stall`` and is
    under way for ``total`` seconds, in which a step takes ``beside`` longer."""

    def __init__(self, start: int = 0, **spec: Any) -> None:
        self.now, self.spec = 0.0, CheckpointSpec(**spec)
        self.schedule = Schedule(self.spec, start, lambda: self.now)
        self.due, self.step = first_due(self.spec, start), start
        self.saved: list[tuple[int, float]] = []
        self.asked = 0
        self.spent = 0.0

    def go(self, steps: int, seconds: Any, stall: float = 0.0, total: float = 0.0, beside: float = 0.0) -> None:
        until: float | None = None
        for _ in range(steps):
            self.schedule.restart_step_timer()
            self.step += 1
            busy = until is not None
            self.now += (seconds(self.step) if callable(seconds) else seconds) + (beside if busy else 0.0)
            self.spent += beside if busy else 0.0
            if until is not None and self.now >= until:
                self.schedule.record_step(True, 0.0)
                self.schedule.record_save(stall, total)
                until = None
            else:
                self.schedule.record_step(busy, 0.0)
            if self.step < self.due:
                continue
            self.asked += 1
            if self.schedule.is_due(self.step):
                self.schedule.record_save_begin(self.step)
                self.saved.append((self.step, self.now))
                self.now, self.spent = self.now + stall, self.spent + stall
                until = self.now + total
            self.due = self.schedule.next_check(self.step)


def test_every_steps_saves_at_multiples_from_any_start_step() -> None:
    run = Run(start=7, every_steps=5)
    run.go(20, 1.0)
    assert [step for step, _ in run.saved] == [10, 15, 20, 25] and run.asked == 4
    assert first_due(CheckpointSpec(every_steps=None), 3) == math.inf


def test_every_seconds_saves_within_one_step_of_interval() -> None:
    run = Run(every_seconds=60)
    run.go(3000, 0.7)
    gaps = [b - a for (_, a), (_, b) in pairwise(run.saved)]
    assert len(gaps) > 30 and all(abs(gap - 60) <= 0.7 for gap in gaps)
    assert run.asked < 12 * len(run.saved)  # rank 0 is not asked at every step

    # Steps that become four times as slow are late once, and by less than the time again.
    slower = Run(every_seconds=60)
    slower.go(1000, lambda step: 0.5 if step < 300 else 2.0)
    gaps = [b - a for (_, a), (_, b) in pairwise(slower.saved)]
    assert max(gaps) < 120 and all(abs(gap - 60) <= 2.0 for gap in gaps[-5:])


def test_every_steps_and_every_seconds_save_whichever_is_first() -> None:
    run = Run(every_steps=50, every_seconds=30)
    run.go(200, 1.0)
    assert [step for step, _ in run.saved][:6] == [30, 50, 80, 100, 130, 150]


@pytest.mark.parametrize(("step", "stall", "total", "beside", "share"), [
    (0.1, 0.02, 1.0, 0.01, 0.03), (2.0, 0.5, 8.0, 0.1, 0.03), (0.05, 0.05, 0.2, 0.0, 0.1), (0.3, 0.0, 30.0, 0.0, 0.03),
])  # fmt: skip
def test_auto_interval_keeps_to_max_overhead(
    step: float, stall: float, total: float, beside: float, share: float
) -> None:
    run = Run(every_steps="auto", max_overhead=share)
    run.go(200, step, stall, total, beside)
    run.spent, before = 0.0, run.now
    first = len(run.saved)
    run.go(6000, step, stall, total, beside)
    assert run.spent / (run.now - before) <= share * 1.1
    steps = [step for step, _ in run.saved[first:]]
    gaps = {b - a for a, b in pairwise(steps)}
    # No longer than it must be: by the share, or by what one save takes.
    cost = stall + beside * total / step
    assert max(gaps) <= max(cost / (share * step), total / step) * 1.3 + 2


def test_spec_with_every_seconds_alone_has_no_every_steps() -> None:
    assert CheckpointSpec(every_seconds=60).every_steps is None  # type: ignore[arg-type]
    assert CheckpointSpec(every_seconds="10m", every_steps=5).every_seconds == 600  # type: ignore[arg-type]


@pytest.mark.parametrize(("spec", "asked"), [
    ({}, 1), ({"first": "off"}, math.inf), ({"first": 7}, 7), ({"every_steps": None}, math.inf),
    ({"every_steps": None, "first": 7}, 7), ({"every_steps": "auto"}, 1), ({"every_seconds": 60}, 1),
])  # fmt: skip
def test_early_save_first_check_step_follows_spec(spec: dict[str, Any], asked: float) -> None:
    assert early_due(CheckpointSpec(**spec), 0) == asked
    behind = math.inf if "first" in spec else asked + 500
    assert early_due(CheckpointSpec(**spec), 500) == behind


@pytest.mark.parametrize(("cost", "after"), [(1.9, 0.5), (2.0, 40.0), (30.0, 600.0)])
def test_early_save_delay_depends_on_expected_save_cost(cost: float, after: float) -> None:
    now, asked, due, step = 0.0, 0, 1, 0
    schedule = Schedule(CheckpointSpec(every_steps=10_000), 0, lambda: now)
    while step < 5000:
        now += 3.0  # an evaluation, say: not trained
        schedule.restart_step_timer()
        step, now = step + 1, now + 0.5
        schedule.record_step(False, 0.0)
        if step == due:
            asked += 1
            if (due := schedule.next_early_check(step, cost)) == step:
                break
    assert step * 0.5 == pytest.approx(after, abs=0.5) and asked < 15


def test_early_save_duration_does_not_shift_schedule() -> None:
    def saved(first: bool) -> list[tuple[int, float]]:
        run = Run(every_steps="auto")
        if first:
            run.schedule.record_save(5.0, 50.0, first=True)
            assert run.schedule.save_seconds() == 50.0  # of a stop, it says how long a save takes
        run.go(400, 0.1, 0.02, 0.5)
        assert run.schedule.save_seconds() == 0.5
        return run.saved

    assert saved(True) == saved(False)
