"""Time that no clock's step lengthens: what an attempt has run, over restarts, machines and jumps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet_service import verdict
from ratchet_service.clock import Clock
from ratchet_service.leases import expired
from ratchet_service.steady import TOLERANCE, Count, Jumps, counted

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


class Watched(Clock):
    def __init__(self) -> None:
        self.passed, self.set_by, self.start = 0.0, 0.0, "one"

    def now(self) -> datetime:
        return BEGUN + timedelta(seconds=self.passed + self.set_by)

    def monotonic(self) -> float:
        return 1000.0 + self.passed

    def boot(self) -> str:
        return self.start


@pytest.mark.parametrize("by", [3600.0, -3600.0, TOLERANCE + 1])
def test_a_jump_is_told_with_its_length_until_it_is_seen_and_a_little_drift_is_none(by: float) -> None:
    clock = Watched()
    jumps = Jumps(clock)
    clock.passed += 500.0
    clock.set_by += TOLERANCE / 2
    assert jumps.look() == 0.0
    clock.set_by += by
    assert jumps.look() == jumps.look() == pytest.approx(by + TOLERANCE / 2)
    jumps.seen(jumps.look())
    assert jumps.look() == 0.0


@pytest.mark.parametrize("by", [3600.0, -3600.0])
def test_what_an_attempt_has_run_is_counted_on_by_the_next_process_of_the_machine(by: float) -> None:
    clock = Watched()
    stored = Count(5.0, "one", clock.monotonic())._asdict()
    clock.passed += 100.0
    clock.set_by += by
    assert counted(stored, BEGUN, clock) == pytest.approx(105.0)


@pytest.mark.parametrize("by", [0.0, 3600.0])
def test_after_a_start_of_the_machine_what_nobody_saw_is_not_counted(by: float) -> None:
    clock = Watched()
    stored = Count(5.0, "one", clock.monotonic())._asdict()
    clock.start, clock.passed, clock.set_by = "two", -900.0, 1000.0 + by
    assert counted(stored, BEGUN, clock) == 5.0


@pytest.mark.parametrize("stored", [None, {}, {"seconds": "x", "boot": 1, "monotonic": None}])
def test_an_attempt_of_the_version_before_is_counted_by_its_stored_times(stored: Any) -> None:
    clock = Watched()
    clock.passed = 70.0
    assert counted(stored, BEGUN, clock) == 70.0
    assert counted(stored, None, clock) is None
    clock.set_by = -3600.0
    assert counted(stored, BEGUN, clock) == 0.0


@pytest.mark.parametrize(
    ("ended", "now", "counts"),
    [
        (100.0, 101.0, 100.0),  # as its agent says
        (3700.0, 3701.0, 99.0),  # a jump of an hour: what was counted until now, less what has passed since its end
        (0.0, -3500.0, 100.0),  # an hour back
        (100.0, 4000.0, 0.0),  # nobody was there for an hour, or it was a jump behind the end: late rather than early
    ],
)
def test_what_an_ended_attempt_has_run_is_what_was_counted(ended: float, now: float, counts: float) -> None:
    attempt: Any = SimpleNamespace(begun_at=BEGUN)
    at, wall = BEGUN + timedelta(seconds=ended), BEGUN + timedelta(seconds=now)
    assert verdict._running_seconds(attempt, at, 100.0, wall) == counts
    assert verdict._running_seconds(attempt, at, None, wall) == ended


def test_a_lease_of_before_its_clock_was_set_back_keeps_nobody_from_the_job() -> None:
    assert not expired("token", BEGUN + timedelta(seconds=15), BEGUN)
    assert expired("token", BEGUN + timedelta(hours=1), BEGUN)
