"""Stores in an attempt's row how much time of each of its deadlines has passed. A reconciler that takes the attempt over
continues these deadlines. The row is written at important events, and when the lease is renewed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_service.db.clock import Clock
from ratchet_service.db.models import Attempt
from ratchet_service.lifecycle import monotonic_deadlines
from ratchet_service.lifecycle.monotonic_deadlines import Count
from ratchet_service.lifecycle.supervision import Supervision
from ratchet_service.reconciler.attempt_watch import Watch

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


def running_deadlines(known: Supervision, *, is_queued: bool) -> dict[str, float]:
    """Return name -> monotonic start of the deadlines that run now; none while the attempt is being killed. ``is_queued``: the
    attempt waits in its engine's queue."""
    if known.killing:
        return {}
    since = {
        # from the end of the wait in the engine's queue until the first agent begins
        LAUNCH: known.last_queued_at if known.running_since is None and not is_queued else None,
        STOP_REQUEST: known.stop_requested_since,
        STOP: None if known.signal_unsent else known.stopped_at,
        RESULT: known.result_seen_at,
        LOST: known.lost_since,
    }
    return {name: at for name, at in since.items() if at is not None}


def to_row(known: Supervision, now: float, boot: str, *, is_queued: bool) -> dict[str, Any]:
    """Return the value of the row's column ``deadlines``. ``now``: monotonic; ``boot``: id of this machine's boot."""
    since = running_deadlines(known, is_queued=is_queued)
    if known.running_since is not None:
        since[RUN] = known.running_since
    out: dict[str, Any] = {name: Count(now - at, boot, now)._asdict() for name, at in since.items()}
    if STOP_REQUEST in out:
        out[STOP_REQUEST][_REQUEST_ID] = known.stop_request_id
    return out


def write(session: Session, watches: Sequence[Watch], now: float, boot: str) -> None:
    """Store the deadlines of attempts in their rows. The caller has locked the rows of their jobs, which have this process's
    leases."""
    if not watches:
        return
    rows = [
        {
            "job": watch.lease.job_id,
            "attempt": watch.lease.attempt,
            "kept": to_row(watch.known, now, boot, is_queued=watch.is_queued),
        }
        for watch in watches
    ]
    row = (Attempt.job_id == sa.bindparam("job")) & (Attempt.number == sa.bindparam("attempt"))
    session.connection().execute(sa.update(Attempt).where(row).values(deadlines=sa.bindparam("kept")), rows)
    for watch in watches:
        watch.stored_deadlines = running_deadlines(watch.known, is_queued=watch.is_queued)


def is_write_due(watch: Watch, now: float) -> bool:
    """True if a deadline has run for some time and its start is not stored yet. The launch deadline and the deadline after a
    SIGTERM are not considered."""
    since = running_deadlines(watch.known, is_queued=watch.is_queued)
    return any(
        name in since and now - since[name] >= _WRITE_AFTER_SECONDS and watch.stored_deadlines.get(name) != since[name]
        for name in (STOP_REQUEST, RESULT, LOST)
    )


def restore(
    known: Supervision,
    stored_deadlines: Mapping[str, Any],
    clock: Clock,
    *,
    has_slots: bool,
    max_gap: float,
    launch_deadline: float,
) -> Supervision:
    """Return ``known``, which comes from ``restore_actions``, with the start times of the deadlines that an earlier reconciler
    counted. The present is ``known.created_at``. At most ``max_gap`` seconds since the counts were stored count. ``has_slots``:
    Ratchet manages the slots of the attempt's launcher. ``launch_deadline``: in seconds."""
    counts, now = stored_deadlines, known.created_at

    def start_of(name: str) -> float | None:
        """Return the monotonic start of this deadline; None: it is not stored."""
        seconds = monotonic_deadlines.carried_seconds(counts.get(name), clock, max_gap)
        return None if seconds is None else now - seconds

    launched, requested, stopped = start_of(LAUNCH), start_of(STOP_REQUEST), start_of(STOP)
    if launched is not None and (has_slots or _recently_polled(counts[LAUNCH], clock, launch_deadline)):
        known = replace(known, created_at=launched, last_queued_at=launched)
    # otherwise the history has no SIGTERM, or it may not have been sent
    if known.stopped_at is not None and stopped is not None:
        known = replace(known, stopped_at=stopped, signal_unsent=False)
    return replace(
        known,
        stop_requested_since=requested,
        stop_request_id=None if requested is None else counts[STOP_REQUEST].get(_REQUEST_ID),
        result_seen_at=start_of(RESULT),
        lost_since=start_of(LOST),
    )


def _recently_polled(count: Any, clock: Clock, launch_deadline: float) -> bool:
    """True if ``count`` was stored during this boot and at most half a launch deadline ago."""
    found = Count.parse(count)
    assert found is not None
    # if it is older, an engine with a queue may have put the attempt back into it meanwhile
    return found.boot == clock.boot_id() and clock.monotonic() - found.monotonic <= launch_deadline / 2
