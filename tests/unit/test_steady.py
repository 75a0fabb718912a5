"""Time that no clock's step lengthens: what an attempt has run, over restarts, machines and jumps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet_service import clock as clocks
from ratchet_service import verdict
from ratchet_service.clock import Clock
from ratchet_service.leases import expired
from ratchet_service.steady import TOLERANCE, Count, between, carried, counted, jumped

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
def test_a_jump_is_told_with_its_length_and_a_little_drift_is_none(by: float) -> None:
    clock = Watched()
    level = between(clock, clock.now)
    clock.passed += 500.0
    clock.set_by += TOLERANCE / 2
    assert jumped(between(clock, clock.now), level) == 0.0
    clock.set_by += by
    assert jumped(between(clock, clock.now), level) == pytest.approx(by + TOLERANCE / 2)


@pytest.mark.parametrize("by", [3600.0, -3600.0])
def test_of_a_deadline_is_carried_what_was_counted_and_little_of_what_nobody_saw(by: float) -> None:
    clock = Watched()
    stored = Count(5.0, "one", clock.monotonic())._asdict()
    clock.passed, clock.set_by = 2.0, by
    assert carried(stored, clock, 3.75) == 7.0
    clock.passed = 3600.0
    assert carried(stored, clock, 3.75) == 8.75
    clock.start, clock.passed = "two", -900.0
    assert carried(stored, clock, 3.75) == 5.0


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


@pytest.mark.parametrize(
    "stored",
    [
        None,
        {},
        [],
        "x",
        {"seconds": "x", "boot": 1, "monotonic": None},
        {"seconds": 10**400, "boot": "one", "monotonic": 0},
        {"seconds": float("nan"), "boot": "one", "monotonic": 0.0},
        {"seconds": -1.0, "boot": "one", "monotonic": 0.0},
        {"seconds": 1.0, "boot": "one", "monotonic": float("inf")},
    ],
)
def test_what_cannot_be_read_or_the_version_before_left_out_counts_as_none(stored: Any) -> None:
    clock = Watched()
    assert carried(stored, clock, 3.75) is None
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


@pytest.mark.parametrize(
    ("offsets", "boot"),
    [
        (None, "b"),
        ("monotonic           0         0\nboottime            0         0\n", "b"),
        ("monotonic     1000000         5\nboottime            0         0\n", "b+1000000.5"),
    ],
)
def test_a_container_with_a_time_of_its_own_shares_its_clock_with_nobody_else(
    monkeypatch: pytest.MonkeyPatch, offsets: str | None, boot: str
) -> None:
    class File:
        def __init__(self, path: str) -> None:
            self.path = path

        def read_text(self) -> str:
            if self.path == "/proc/sys/kernel/random/boot_id":
                return "b\n"
            if offsets is None:
                raise FileNotFoundError(self.path)
            return offsets

    monkeypatch.setattr(clocks, "Path", File)
    assert clocks._boot.__wrapped__() == boot
