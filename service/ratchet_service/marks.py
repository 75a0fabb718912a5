"""An attempt's clocks, in its row: what has been counted of its deadlines, for the reconciler that takes it over.

Written with what is written anyway (the attempt), once the engine has taken a SIGTERM, once a deadline that nobody writes of is
``_AFTER`` old, and with each renewal of the lease for as long as one runs. Who takes over counts on (``steady.carried``); a wish
that was taken back and made again is another one. Unreadable rows, and those of the version before, count as none.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_service import steady
from ratchet_service.clock import Clock
from ratchet_service.models import Attempt
from ratchet_service.steady import Count
from ratchet_service.watched import WAITING, Watch

RUN: Final = "run"
"""No deadline of its own: what ``policy.timeout`` is about."""
LAUNCH: Final = "launch"
WISH: Final = "wish"
STOP: Final = "stop"
RESULT: Final = "result"
LOST: Final = "lost"
_OF: Final = "of"
"""Which wish it is: the time at which it was made."""
_AFTER: Final = 1.0
"""Seconds. Most wishes, results and losses are over by then, and cost no write."""


def made(clock: Clock) -> dict[str, Any]:
    """Of an attempt that is made now."""
    return {LAUNCH: Count(0.0, clock.boot(), clock.monotonic())._asdict()}


def running(watch: Watch) -> dict[str, float]:
    """The deadlines that run, each with the monotonic time since which it does. In an engine's queue no start is due."""
    if watch.killing:
        return {}
    starts = watch.running_since is None and (watch.said is None or watch.said[0] != WAITING)
    since = {
        LAUNCH: watch.waited_until if starts else None,
        WISH: watch.wished_since,
        STOP: None if watch.unsent else watch.stopped_at,
        RESULT: watch.result_seen_at,
        LOST: watch.lost_since,
    }
    return {name: at for name, at in since.items() if at is not None}


def stored(watch: Watch, now: float, boot: str) -> dict[str, Any]:
    """What the attempt's row is to say. ``now``: monotonic."""
    since = running(watch)
    if watch.running_since is not None:
        since[RUN] = watch.running_since
    out: dict[str, Any] = {name: Count(now - at, boot, now)._asdict() for name, at in since.items()}
    if WISH in out:
        out[WISH][_OF] = watch.wish_of
    return out


def write(session: Session, watch: Watch, now: float, boot: str) -> None:
    """The caller holds the job's row, with our lease on it."""
    row = (Attempt.job_id == watch.lease.job_id) & (Attempt.number == watch.lease.epoch)
    values = sa.update(Attempt).where(row).values(clocks=stored(watch, now, boot))
    session.execute(values.execution_options(synchronize_session=False))
    watch.marked = running(watch)


def keep(session: Session, watches: list[Watch], now: float, boot: str) -> None:
    """As ``write``, for many."""
    if not watches:
        return
    rows = [
        {"job": watch.lease.job_id, "epoch": watch.lease.epoch, "kept": stored(watch, now, boot)} for watch in watches
    ]
    row = (Attempt.job_id == sa.bindparam("job")) & (Attempt.number == sa.bindparam("epoch"))
    session.connection().execute(sa.update(Attempt).where(row).values(clocks=sa.bindparam("kept")), rows)
    for watch in watches:
        watch.marked = running(watch)


def due(watch: Watch, now: float) -> bool:
    """Has a deadline run for a while that the row does not know?"""
    since = running(watch)
    return any(
        name in since and now - since[name] >= _AFTER and watch.marked.get(name) != since[name]
        for name in (WISH, RESULT, LOST)
    )


def recall(watch: Watch, clocks: Any, clock: Clock, most: float, launch_deadline: float) -> None:
    """Let the deadlines of a watch that was made just now go on. ``clocks``: the attempt's row's; ``most``: as of
    ``steady.carried``."""
    counts, now = clocks if isinstance(clocks, dict) else {}, watch.made_at

    def since(name: str) -> float | None:
        seconds = steady.carried(counts.get(name), clock, most)
        return None if seconds is None else now - seconds

    launched = since(LAUNCH)
    if launched is not None and (watch.launcher.slots or _just_seen(counts[LAUNCH], clock, launch_deadline)):
        watch.made_at = watch.waited_until = launched
    watch.wished_since, watch.result_seen_at, watch.lost_since = since(WISH), since(RESULT), since(LOST)
    if watch.wished_since is not None:
        watch.wish_of = counts[WISH].get(_OF)
    stopped = since(STOP)
    if watch.stopped_at is not None and stopped is not None:
        watch.stopped_at, watch.unsent = stopped, False
    watch.marked = running(watch)


def _just_seen(count: Any, clock: Clock, launch_deadline: float) -> bool:
    """An engine with a queue of its own may have taken it back there, and out again, while nobody looked for long."""
    found = Count.read(count)
    assert found is not None
    return found.boot == clock.boot() and clock.monotonic() - found.monotonic <= launch_deadline / 2
