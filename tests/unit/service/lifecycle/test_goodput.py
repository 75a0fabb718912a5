"""Where a job's time went: tables of single attempts, and that no second is lost or counted twice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet_contract.phases import Cause, Outcome
from ratchet_service.lifecycle.goodput import Parts, Span, notice_given, notice_used, parts_of, total_parts

T0 = datetime(2026, 1, 1, tzinfo=UTC)


def at(seconds: float | None) -> datetime | None:
    return None if seconds is None else T0 + timedelta(seconds=seconds)


def span(until: float, **more: Any) -> Span:
    times = {key: at(more.pop(key, None)) for key in ("begun", "training", "stop", "end_began")}
    return Span(created=T0, until=T0 + timedelta(seconds=until), **times, **more)


WHOLE: dict[str, Any] = {"begun": 10, "training": 20}

TABLE = {
    "waits in its engine's queue": (span(50), Parts(queued=50)),
    "never trained": (span(50, begun=10), Parts(queued=10, launching=40)),
    "failed while it started": (span(50, begun=10, end_began=40), Parts(queued=10, launching=30, stopping=10)),
    "completed": (span(120, **WHOLE, end_began=120, steps_done=50), Parts(10, 10, 100)),
    "stood still for saves": (span(120, **WHOLE, steps_done=50, stall=4), Parts(10, 10, 96, stall=4)),
    "killed: 10 of 50 steps lost": (
        span(120, **WHOLE, steps_done=50, steps_lost=10, stall=5),
        Parts(10, 10, 76, 19, 5),
    ),
    "killed before its first save": (span(120, **WHOLE, steps_done=7, steps_lost=7), Parts(10, 10, 0, 100)),
    "trained no step": (span(120, **WHOLE), Parts(10, 10, 0, 100)),
    "stopped, and took 15 s to save": (
        span(120, **WHOLE, stop=105, end_began=119, steps_done=50),
        Parts(10, 10, 85, stopping=15),
    ),
    "hung for 30 s": (
        span(120, **WHOLE, end_began=90, steps_done=50, steps_lost=25),
        Parts(10, 10, 35, 35, stopping=30),
    ),
    "a script without a Session": (
        span(120, **WHOLE, unmanaged=True, end_began=110),
        Parts(10, 10, stopping=10, unseen=90),
    ),
    "a worker whose clock is ahead": (span(120, begun=10, training=500, steps_done=9), Parts(10, 110)),
    "a worker whose clock is behind": (
        span(120, begun=10, training=-99, end_began=-50, steps_done=9),
        Parts(10, stopping=110),
    ),
    "more stall than training": (span(120, **WHOLE, steps_done=9, stall=1e9), Parts(10, 10, stall=100)),
}


@pytest.mark.parametrize("name", TABLE)
def test_attempt_time_is_split_into_parts(name: str) -> None:
    given_, expected = TABLE[name]
    assert parts_of(given_) == pytest.approx(expected)


def test_goodput_is_useful_share_of_counted_time() -> None:
    attempts = [
        Span(T0, T0 + timedelta(seconds=40), begun=T0, training=at(10), steps_done=10, steps_lost=10),
        Span(T0 + timedelta(seconds=50), T0 + timedelta(seconds=110), begun=at(50), training=at(60), steps_done=20),
    ]
    parts = total_parts(attempts, T0 - timedelta(seconds=5), T0 + timedelta(seconds=115), paused_seconds=20)
    assert parts == pytest.approx(Parts(queued=0, launching=20, useful=50, lost=30))
    assert parts.goodput == pytest.approx(0.5)
    assert total_parts(attempts, T0, T0 + timedelta(seconds=200), 0).queued == pytest.approx(100)


def test_goodput_of_unmanaged_or_empty_job_is_none() -> None:
    assert total_parts([span(120, **WHOLE, unmanaged=True)], T0, T0 + timedelta(seconds=120), 0).goodput is None
    assert total_parts([], T0, T0, 0).goodput is None
    assert total_parts([], T0, T0 + timedelta(seconds=9), 0).goodput == 0.0


_TIMES = st.none() | st.floats(-100, 1000)


@given(
    created=st.floats(0, 500), length=st.floats(0, 500), begun=_TIMES, training=_TIMES, stop=_TIMES, end_began=_TIMES,
    done=st.integers(-5, 1000), lost=st.integers(0, 2000), stall=st.floats(0, 1e6), unmanaged=st.booleans(),
)  # fmt: skip
def test_attempt_parts_sum_to_wall_time(
    created: float, length: float, begun: float | None, training: float | None, stop: float | None, end_began: float | None,
    done: int, lost: int, stall: float, unmanaged: bool,
) -> None:  # fmt: skip
    begin = T0 + timedelta(seconds=created)
    one = Span(
        begin,
        begin + timedelta(seconds=length),
        at(begun),
        at(training),
        at(stop),
        at(end_began),
        done,
        lost,
        stall,
        unmanaged,
    )
    parts = parts_of(one)
    assert all(seconds >= -1e-6 for seconds in parts), parts
    assert parts.wall == pytest.approx((one.until - one.created).total_seconds(), abs=1e-6)
    paused = created / 2
    whole = total_parts([one], T0, one.until, paused)
    assert whole.wall == pytest.approx((one.until - T0).total_seconds() - paused, abs=1e-6)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (Cause.SIGTERM, 30),
        (Cause.EVICTED, 30),
        (Cause.TIME_LIMIT, 30),
        (Cause.API_PREEMPT, 120),
        (Cause.API_SUSPEND, 120),
    ],
)
def test_notice_given_depends_on_cause(cause: Cause, expected: float) -> None:
    assert notice_given(cause, 120, 30) == expected
    assert notice_given(cause, 120, None) == 120


@pytest.mark.parametrize(
    ("outcome", "stop", "saved", "unsaved", "expected"),
    [
        (Outcome.PREEMPTED, None, None, False, None),
        (Outcome.PREEMPTED, 10, 14, False, 4),
        (Outcome.FAILED, 10, 14, True, 4),  # saved, and failed behind it
        (Outcome.PREEMPTED, 10, None, False, 20),  # nothing was left to save
        (Outcome.PREEMPTED, 10, None, True, None),  # killed before it was saved
        (Outcome.FAILED, 10, None, False, None),
        (Outcome.SUSPENDED, 10, 9.5, False, 0),
    ],
)
def test_notice_used_is_time_from_stop_to_save(
    outcome: Outcome, stop: float | None, saved: float | None, unsaved: bool, expected: float | None
) -> None:
    assert notice_used(outcome, at(stop), at(saved), at(30), unsaved=unsaved) == expected
