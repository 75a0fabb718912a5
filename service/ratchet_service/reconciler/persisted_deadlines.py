"""Stores in an attempt's row how much time of each of its deadlines has passed. A reconciler that takes the attempt over
continues these deadlines. The row is written at important events, and when the lease is renewed."""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_service.db.clock import Clock
from ratchet_service.db.models import Attempt
from ratchet_service.lifecycle import monotonic_deadlines
from ratchet_service.lifecycle.monotonic_deadlines import Count
from ratchet_service.reconciler.attempt_watch import WAITING, Watch

RUN: Final = "run"
"""The time that the attempt has run, part of what ``policy.timeout`` limits; not a deadline itself."""
LAUNCH: Final = "launch"
STOP_REQUEST: Final = "wish"
STOP: Final = "stop"
RESULT: Final = "result"
LOST: Final = "lost"
_REQUEST_ID: Final = "of"
"""Identifies the request: ``DesiredState.request_id``."""
_WRITE_AFTER_SECONDS: Final = 1.0
"""Seconds. Most requests, results and losses are over by then, and cost no write."""


def initial_deadlines(clock: Clock) -> dict[str, Any]:
    """Return the deadlines of an attempt that is created now: the launch deadline, of which no time has passed."""
    return {LAUNCH: Count(0.0, clock.boot_id(), clock.monotonic())._asdict()}


def running_since(watch: Watch) -> dict[str, float]:
    """Return name -> monotonic start of the deadlines that run now; none while the attempt is being killed."""
    if watch.killing:
        return {}
    starts = watch.running_since is None and (watch.stored_reason is None or watch.stored_reason[0] != WAITING)
    since = {
        # from the end of the wait in the engine's queue until the first agent begins
        LAUNCH: watch.last_queued_at if starts else None,
        STOP_REQUEST: watch.stop_requested_since,
        STOP: None if watch.signal_unsent else watch.stopped_at,
        RESULT: watch.result_seen_at,
        LOST: watch.lost_since,
    }
    return {name: at for name, at in since.items() if at is not None}


def to_row(watch: Watch, now: float, boot: str) -> dict[str, Any]:
    """Return the value of the row's column ``deadlines``. ``now``: monotonic; ``boot``: id of this machine's boot."""
    since = running_since(watch)
    if watch.running_since is not None:
        since[RUN] = watch.running_since
    out: dict[str, Any] = {name: Count(now - at, boot, now)._asdict() for name, at in since.items()}
    if STOP_REQUEST in out:
        out[STOP_REQUEST][_REQUEST_ID] = watch.stop_request_id
    return out


def write(session: Session, watch: Watch, now: float, boot: str) -> None:
    """Store the attempt's deadlines in its row. The caller has locked the job's row, which has this process's lease."""
    row = (Attempt.job_id == watch.lease.job_id) & (Attempt.number == watch.lease.attempt)
    values = sa.update(Attempt).where(row).values(deadlines=to_row(watch, now, boot))
    session.execute(values.execution_options(synchronize_session=False))
    watch.stored_deadlines = running_since(watch)


def write_many(session: Session, watches: list[Watch], now: float, boot: str) -> None:
    """Store the deadlines of many attempts in their rows. The caller has locked the rows of their jobs, which have this
    process's leases."""
    if not watches:
        return
    rows = [
        {"job": watch.lease.job_id, "attempt": watch.lease.attempt, "kept": to_row(watch, now, boot)}
        for watch in watches
    ]
    row = (Attempt.job_id == sa.bindparam("job")) & (Attempt.number == sa.bindparam("attempt"))
    session.connection().execute(sa.update(Attempt).where(row).values(deadlines=sa.bindparam("kept")), rows)
    for watch in watches:
        watch.stored_deadlines = running_since(watch)


def is_write_due(watch: Watch, now: float) -> bool:
    """True if a deadline has run for some time and its start is not stored yet. The launch deadline and the deadline after a
    SIGTERM are not considered."""
    since = running_since(watch)
    return any(
        name in since and now - since[name] >= _WRITE_AFTER_SECONDS and watch.stored_deadlines.get(name) != since[name]
        for name in (STOP_REQUEST, RESULT, LOST)
    )


def restore(watch: Watch, stored_deadlines: Any, clock: Clock, max_gap: float, launch_deadline: float) -> None:
    """Set in a new watch, after ``restore_actions``, the start times of the deadlines that an earlier reconciler counted.
    At most ``max_gap`` seconds since then count. ``launch_deadline``: in seconds."""
    counts, now = stored_deadlines if isinstance(stored_deadlines, dict) else {}, watch.created_at

    def start_of(name: str) -> float | None:
        """Return the monotonic start of this deadline; None: it is not stored."""
        seconds = monotonic_deadlines.carried_seconds(counts.get(name), clock, max_gap)
        return None if seconds is None else now - seconds

    launched = start_of(LAUNCH)
    if launched is not None and (watch.launcher.slots or _recently_polled(counts[LAUNCH], clock, launch_deadline)):
        watch.created_at = watch.last_queued_at = launched
    watch.stop_requested_since, watch.result_seen_at, watch.lost_since = (
        start_of(STOP_REQUEST),
        start_of(RESULT),
        start_of(LOST),
    )
    if watch.stop_requested_since is not None:
        watch.stop_request_id = counts[STOP_REQUEST].get(_REQUEST_ID)
    stopped = start_of(STOP)
    # otherwise the history has no SIGTERM, or it may not have been sent
    if watch.stopped_at is not None and stopped is not None:
        watch.stopped_at, watch.signal_unsent = stopped, False
    watch.stored_deadlines = running_since(watch)


def _recently_polled(count: Any, clock: Clock, launch_deadline: float) -> bool:
    """True if ``count`` was stored during this boot and at most half a launch deadline ago."""
    found = Count.parse(count)
    assert found is not None
    # if it is older, an engine with a queue may have put the attempt back into it meanwhile
    return found.boot == clock.boot_id() and clock.monotonic() - found.monotonic <= launch_deadline / 2
