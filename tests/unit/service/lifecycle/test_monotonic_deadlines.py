"""Time that no clock's step lengthens: what an attempt has run, over restarts, machines and jumps."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from ratchet_service.db import clock as clocks
from ratchet_service.db.clock import Clock
from ratchet_service.db.leases import is_expired
from ratchet_service.lifecycle import attempt_result
from ratchet_service.lifecycle.monotonic_deadlines import Count, carried_seconds, counted_seconds

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


class Watched(Clock):
    def __init__(self) -> None:
        self.passed, self.set_by, self.start = 0.0, 0.0, "one"

    def now(self) -> datetime:
        return BEGUN + timedelta(seconds=self.passed + self.set_by)

    def monotonic(self) -> float:
        return 1000.0 + self.passed

    def boot_id(self) -> str:
        return self.start


@pytest.mark.parametrize("by", [3600.0, -3600.0])
def test_carried_deadline_bounds_time_not_observed(by: float) -> None:
    clock = Watched()
    stored = Count(5.0, "one", clock.monotonic())._asdict()
    clock.passed, clock.set_by = 2.0, by
    assert carried_seconds(stored, clock, 3.75) == 7.0
    clock.passed = 3600.0
    assert carried_seconds(stored, clock, 3.75) == 8.75
    clock.start, clock.passed = "two", -900.0
    assert carried_seconds(stored, clock, 3.75) == 5.0


@pytest.mark.parametrize("by", [3600.0, -3600.0])
def test_running_time_continues_in_next_process_despite_clock_step(by: float) -> None:
    clock = Watched()
    stored = Count(5.0, "one", clock.monotonic())._asdict()
    clock.passed += 100.0
    clock.set_by += by
    assert counted_seconds(stored, BEGUN, clock) == pytest.approx(105.0)


@pytest.mark.parametrize("by", [0.0, 3600.0])
def test_running_time_excludes_unobserved_time_after_reboot(by: float) -> None:
    clock = Watched()
    stored = Count(5.0, "one", clock.monotonic())._asdict()
    clock.start, clock.passed, clock.set_by = "two", -900.0, 1000.0 + by
    assert counted_seconds(stored, BEGUN, clock) == 5.0


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
def test_unreadable_stored_running_time_counts_as_none(stored: Any) -> None:
    clock = Watched()
    assert carried_seconds(stored, clock, 3.75) is None
    clock.passed = 70.0
    assert counted_seconds(stored, BEGUN, clock) == 70.0
    assert counted_seconds(stored, None, clock) is None
    clock.set_by = -3600.0
    assert counted_seconds(stored, BEGUN, clock) == 0.0


@pytest.mark.parametrize(
    ("ended", "now", "counts"),
    [
        (100.0, 101.0, 100.0),  # as its agent says
        (3700.0, 3701.0, 99.0),  # a jump of an hour: what was counted until now, less what has passed since its end
        (0.0, -3500.0, 100.0),  # an hour back
        (100.0, 4000.0, 0.0),  # nobody was there for an hour, or it was a jump behind the end: late rather than early
    ],
)
def test_ended_attempt_running_seconds_use_counted_time(ended: float, now: float, counts: float) -> None:
    attempt: Any = SimpleNamespace(begun_at=BEGUN)
    at, wall = BEGUN + timedelta(seconds=ended), BEGUN + timedelta(seconds=now)
    assert attempt_result._running_seconds(attempt, at, 100.0, wall) == counts
    assert attempt_result._running_seconds(attempt, at, None, wall) == ended


def test_lease_far_in_the_future_after_clock_step_is_expired() -> None:
    assert not is_expired("token", BEGUN + timedelta(seconds=15), BEGUN)
    assert is_expired("token", BEGUN + timedelta(hours=1), BEGUN)


@pytest.mark.parametrize(
    ("offsets", "boot"),
    [
        (None, "b"),
        ("monotonic           0         0\nboottime            0         0\n", "b"),
        ("monotonic     1000000         5\nboottime            0         0\n", "b+1000000.5"),
    ],
)
def test_boot_id_includes_time_namespace_offsets(
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
    assert clocks._boot_id.__wrapped__() == boot
