"""Prometheus metrics of one process; a registry of its own, so that two apps in one process do not mix.

What this process does is counted as it commits it, once. What all jobs are doing is asked of the database at each scrape, along
indexes, whatever process did it; numbers of jobs that have ended only grow with the table and are asked for once a minute, while
the scrape that finds them old is answered with those. No label has a job's id, an owner, or another value that users choose.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from sqlalchemy import event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import QueuePool

from ratchet_contract.errors import RatchetError
from ratchet_contract.phases import AttemptPhase, Cause, JobPhase
from ratchet_contract.version import PROTOCOL_VERSION, RATCHET_VERSION
from ratchet_service.database import Database, first_line
from ratchet_service.models import Attempt, Checkpoint, Event, Job
from ratchet_service.redone import DIFFERENCE, redone_of

log = logging.getLogger(__name__)

_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_ROUND_BUCKETS: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
_SAVE_BUCKETS: Final = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0)
_SIZE_BUCKETS: Final = tuple(4.0**n * 2**20 for n in range(10))  # 1 MiB to 256 GiB
_ENDED: Final = tuple(phase for phase in JobPhase if phase.terminal)
_OTHERS: Final = tuple(phase for phase in JobPhase if not phase.terminal)
_ENDED_SECONDS: Final = 60.0
_OLDEST_SECONDS: Final = 2 * _ENDED_SECONDS
"""Beyond which nobody is answered with what was counted then."""
_REASONS: Final = frozenset(
    {
        "none",
        "no-slot",
        "quota",
        "backoff",
        "no-launcher",
        "engine-queue",
        "engine-unreachable",
        "reconcile-error",
        "attempt-ending",
        "disk-full",
        "exit-code",
        "max-failures",
        "max-preemptions",
        "no-progress",
        "same-error",
        "spec-unreadable",
        *(cause.value for cause in Cause),
    }
)


class Instruments:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        registry = self._registry = CollectorRegistry()
        self._ended: dict[JobPhase, int] = {}
        self._ended_at: float | None = None
        self._counting = threading.Lock()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._requests = counter("ratchet_http_requests", "Answers given.", "method", "route", "status")
        self._seconds = histogram(
            "ratchet_http_request_seconds", "Seconds until the answer's first byte.", _BUCKETS, "method", "route"
        )
        self._jobs = gauge(
            "ratchet_jobs", "Jobs by phase: now; those that have ended, a minute or two ago.", "phase"
        )  # fmt: skip
        self._queue = gauge("ratchet_queue_jobs", "Queued jobs by the reason of their wait, now.", "reason")
        self._oldest = gauge(
            "ratchet_queue_oldest_seconds",
            "Since the longest waiting job of that reason came into the queue.",
            "reason",
        )
        self._attempts = counter("ratchet_attempts_ended", "Attempts that this process has ended.", "outcome", "cause")
        self._lost = counter("ratchet_steps_lost", "Steps done in these attempts that no checkpoint has.", "cause")
        self._compared = counter("ratchet_replay_steps_compared", "Steps done again, compared with the first time.")
        self._differences = counter("ratchet_replay_differences", "Attempts in which such a step was another one.")
        self._sizes = histogram("ratchet_checkpoint_bytes", "Checkpoints recorded by this process.", _SIZE_BUCKETS)
        self._saves = histogram("ratchet_checkpoint_seconds", "Of these saves, from boundary to commit.", _SAVE_BUCKETS)
        self._stalls = histogram("ratchet_checkpoint_stall_seconds", "Of these, training stood still.", _SAVE_BUCKETS)
        self._reports = counter("ratchet_reports", "Reports of agents, by what became of them.", "result")
        self._rounds = histogram("ratchet_reconciler_round_seconds", "Rounds of the reconciler.", _ROUND_BUCKETS)
        self._failed = counter("ratchet_reconciler_failed_rounds", "Rounds that an error cut short.")
        self._takeovers = counter("ratchet_lease_takeovers", "Active jobs that nobody looked after, taken over.")
        self._pool = gauge("ratchet_database_connections", "Of this process, now.", "state")
        build = gauge("ratchet_build_info", "1; the labels tell.", "version", "protocol")
        build.labels(RATCHET_VERSION, str(PROTOCOL_VERSION)).set(1)

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """``route`` is the template, never the path: ids must not become label values."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)

    def round(self, seconds: float, failed: bool) -> None:
        self._rounds.observe(seconds)
        if failed:
            self._failed.inc()

    def taken_over(self) -> None:
        self._takeovers.inc()

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Around one report that came with a token. ``stale``: its attempt was over; ``refused``: what it says; ``failed``: the
        service's fault, the agent tries again."""
        try:
            yield
        except RatchetError as error:
            self._reports.labels("stale" if error.code == "stale-epoch" else "refused").inc()
            raise
        except Exception:
            self._reports.labels("failed").inc()
            raise
        self._reports.labels("stored").inc()

    def refused_report(self) -> None:
        """One of another protocol, of which nothing else is understood."""
        self._reports.labels("refused").inc()

    @contextmanager
    def listening(self, database: Database) -> Iterator[None]:
        """Count what is committed through ``database`` within the block."""
        heard = (("after_flush", self._remember), ("after_commit", self._committed), ("after_rollback", self._forget))
        for name, listener in heard:
            event.listen(database.sessions, name, listener)
        try:
            yield
        finally:
            for name, listener in heard:
                event.remove(database.sessions, name, listener)

    def _remember(self, session: Session, _context: Any) -> None:
        """Rows of this transaction that will count once it is committed."""
        told = session.info.setdefault(self, [])
        told += [row for row in session.new if isinstance(row, Checkpoint)]
        told += [row for row in session.new if isinstance(row, Event) and row.type == DIFFERENCE]
        for row in session.dirty:
            if isinstance(row, Attempt) and AttemptPhase.ENDED in (sa.inspect(row).attrs.phase.history.added or ()):
                told.append(row)

    def _forget(self, session: Session) -> None:
        session.info.pop(self, None)

    def _committed(self, session: Session) -> None:
        for row in session.info.pop(self, ()):
            if isinstance(row, Attempt):
                cause = "none" if row.cause is None else row.cause.value
                self._attempts.labels("none" if row.outcome is None else row.outcome.value, cause).inc()
                self._lost.labels(cause).inc(row.steps_lost or 0)
                self._compared.inc(redone_of(row).compared)
            elif isinstance(row, Event):
                self._differences.inc()
            else:
                self._sizes.observe(row.size)
                for instrument, seconds in ((self._saves, row.seconds), (self._stalls, row.stall)):
                    if seconds is not None:
                        instrument.observe(seconds)

    def render(self, database: Database) -> bytes:
        """The text format. Raises SQLAlchemy's errors."""
        with database.read() as session:
            self._count_jobs(session, database)
            self._look_at_queue(session, database)
        pool = database.engine.pool
        if isinstance(pool, QueuePool):
            self._pool.labels("in_use").set(pool.checkedout())
            self._pool.labels("idle").set(pool.checkedin())
        return generate_latest(self._registry)

    def _count_jobs(self, session: Session, database: Database) -> None:
        age = None if self._ended_at is None else self._clock() - self._ended_at
        if age is None or age >= _OLDEST_SECONDS:
            self._count_ended(session)
        elif age >= _ENDED_SECONDS and self._counting.acquire(blocking=False):
            threading.Thread(target=self._count_beside, args=(database,), name="ratchet-count", daemon=True).start()
        for phase, number in (_counted(session, _OTHERS) | self._ended).items():
            self._jobs.labels(phase.value).set(number)

    def _count_beside(self, database: Database) -> None:
        """Of a million jobs it takes a tenth of a second, which no scrape needs to wait for."""
        try:
            with database.read() as session:
                self._count_ended(session)
        except SQLAlchemyError as error:  # the next scrape, or the one after, tries again
            log.warning("jobs that have ended were not counted: %s", first_line(error))
        finally:
            self._counting.release()

    def _count_ended(self, session: Session) -> None:
        now = self._clock()
        self._ended, self._ended_at = _counted(session, _ENDED), now

    def _look_at_queue(self, session: Session, database: Database) -> None:
        query = sa.select(Job.reason, sa.func.count(), sa.func.min(Job.updated_at)).where(Job.phase == JobPhase.QUEUED)
        found: dict[str, tuple[int, float]] = {}
        now = database.clock.now()
        for reason, number, since in session.execute(query.group_by(Job.reason)):
            name = reason or "none"
            name = name if name in _REASONS else "other"
            before = found.get(name, (0, 0.0))
            found[name] = (before[0] + number, max(before[1], (now - since).total_seconds()))
        self._queue.clear()
        self._oldest.clear()
        for name, (number, seconds) in found.items():
            self._queue.labels(name).set(number)
            self._oldest.labels(name).set(max(0.0, seconds))


def _counted(session: Session, phases: tuple[JobPhase, ...]) -> dict[JobPhase, int]:
    query = sa.select(Job.phase, sa.func.count()).where(Job.phase.in_(phases)).group_by(Job.phase)
    return dict.fromkeys(phases, 0) | {phase: number for phase, number in session.execute(query)}  # noqa: C416
