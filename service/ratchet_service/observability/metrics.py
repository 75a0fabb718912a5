"""Prometheus metrics of one process, in a registry of its own. The state of all jobs is queried from the database for scrapes. No
label contains a job's id or an owner."""

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

from ratchet_contract.api.fleet import ParkedView
from ratchet_contract.errors import RatchetError
from ratchet_contract.phases import AttemptPhase, Cause, EventType, JobPhase, Reason
from ratchet_contract.version import PROTOCOL_VERSION, RATCHET_VERSION
from ratchet_service.db.engine import Database, first_line
from ratchet_service.db.models import Attempt, Checkpoint, Event, Job
from ratchet_service.lifecycle.redone_steps import redone_of

log = logging.getLogger(__name__)

_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_ROUND_BUCKETS: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0)
_SAVE_BUCKETS: Final = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0)
_SIZE_BUCKETS: Final = tuple(4.0**n * 2**20 for n in range(10))  # 1 MiB to 256 GiB
_ENDED_PHASES: Final = tuple(phase for phase in JobPhase if phase.terminal)
_OPEN_PHASES: Final = tuple(phase for phase in JobPhase if not phase.terminal)
_ENDED_SECONDS: Final = 60.0
_MAX_AGE_SECONDS: Final = 2 * _ENDED_SECONDS
"""Age in seconds from which a count of ended jobs is not returned any more: the scrape then counts again and waits for the
result."""
_REASONS: Final = frozenset((*Reason, *Cause))


class Instruments:
    """The Prometheus metrics of one process, in their own registry. ``clock`` returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        registry = self._registry = CollectorRegistry()
        self._ended_jobs: dict[JobPhase, int] = {}
        self._ended_counted_at: float | None = None
        self._count_lock = threading.Lock()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(name, text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._requests = counter("ratchet_http_requests", "Answers given.", "method", "route", "status")
        self._request_seconds = histogram(
            "ratchet_http_request_seconds", "Seconds until the first byte of the response.", _BUCKETS, "method", "route"
        )
        self._jobs = gauge(
            "ratchet_jobs", "Jobs by phase; counts of ended jobs are up to two minutes old.", "phase"
        )  # fmt: skip
        self._queue = gauge("ratchet_queue_jobs", "Queued jobs by the reason why they wait.", "reason")
        self._oldest_waits = gauge(
            "ratchet_queue_oldest_seconds",
            "Seconds since the row of the longest waiting job with that reason last changed.",
            "reason",
        )
        self._attempts = counter("ratchet_attempts_ended", "Attempts that this process has ended.", "outcome", "cause")
        self._steps_lost = counter("ratchet_steps_lost", "Steps of these attempts that are in no checkpoint.", "cause")
        self._compared = counter(
            "ratchet_replay_steps_compared", "Steps done again and compared with the first execution."
        )
        self._differences = counter("ratchet_replay_differences", "Attempts in which such a step differed.")
        self._sizes = histogram("ratchet_checkpoint_bytes", "Checkpoints recorded by this process.", _SIZE_BUCKETS)
        self._saves = histogram(
            "ratchet_checkpoint_seconds", "Seconds of these saves, from the step boundary to the commit.", _SAVE_BUCKETS
        )
        self._stalls = histogram(
            "ratchet_checkpoint_stall_seconds", "Seconds of these saves that training was blocked.", _SAVE_BUCKETS
        )
        self._reports = counter("ratchet_reports", "Reports of agents, by outcome.", "result")
        self._rounds = histogram("ratchet_reconciler_round_seconds", "Rounds of the reconciler.", _ROUND_BUCKETS)
        self._failed_rounds = counter("ratchet_reconciler_failed_rounds", "Rounds that an error cut short.")
        self._takeovers = counter(
            "ratchet_lease_takeovers", "Active jobs that this process took over from a reconciler that had ended."
        )
        self._pool = gauge("ratchet_database_connections", "Of this process, now.", "state")
        self.view_parked: Callable[[], ParkedView | None] = lambda: None
        self._parked = gauge("ratchet_parked_agents", "Agents that wait for an attempt, with all imports made.")
        build = gauge("ratchet_build_info", "Always 1; the labels have the versions.", "version", "protocol")
        build.labels(RATCHET_VERSION, str(PROTOCOL_VERSION)).set(1)

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request and its seconds until the answer's first byte. ``route``: the path's template, without ids."""
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(method, route).observe(seconds)

    def observe_round(self, seconds: float, failed: bool) -> None:
        """Record the duration of a round of the reconciler, and whether an error ended it."""
        self._rounds.observe(seconds)
        if failed:
            self._failed_rounds.inc()

    def count_takeover(self) -> None:
        """Count an active job that this process took over from a reconciler that had ended."""
        self._takeovers.inc()

    @contextmanager
    def count_report(self) -> Iterator[None]:
        """Count the agent's report that the block handles, by its result: ``stored``, ``stale``, ``refused`` or ``failed``.
        Errors are raised again."""
        try:
            yield
        except RatchetError as error:
            self._reports.labels("stale" if error.code == "stale-attempt" else "refused").inc()
            raise
        except Exception:
            self._reports.labels("failed").inc()
            raise
        self._reports.labels("stored").inc()

    def count_refused_report(self) -> None:
        """Count one report as ``refused``, such as one in another protocol version."""
        self._reports.labels("refused").inc()

    def show_parked(self, count: Callable[[], int]) -> None:
        """Have scrapes show the number of parked agents that ``count`` returns; any thread may call it."""
        self._parked.set_function(count)

    @contextmanager
    def count_commits(self, database: Database) -> Iterator[None]:
        """Within the block, count what this process commits through ``database``: ended attempts, new checkpoints and replay
        differences."""
        listeners = (
            ("after_flush", self._collect_rows),
            ("after_commit", self._count_committed),
            ("after_rollback", self._discard_rows),
        )
        for name, listener in listeners:
            event.listen(database.session_class, name, listener)
        try:
            yield
        finally:
            for name, listener in listeners:
                event.remove(database.session_class, name, listener)

    def _collect_rows(self, session: Session, _context: Any) -> None:
        """Remember the rows of this transaction that are counted if it is committed. SQLAlchemy calls it after each flush."""
        rows = session.info.setdefault(self, [])
        rows += [row for row in session.new if isinstance(row, Checkpoint)]
        rows += [row for row in session.new if isinstance(row, Event) and row.type == EventType.REPLAY_DIFFERENCE]
        for row in session.dirty:
            if isinstance(row, Attempt) and AttemptPhase.ENDED in (sa.inspect(row).attrs.phase.history.added or ()):
                rows.append(row)

    def _discard_rows(self, session: Session) -> None:
        """Forget the remembered rows of a transaction that was rolled back."""
        session.info.pop(self, None)

    def _count_committed(self, session: Session) -> None:
        """Count the remembered rows of a transaction that was committed."""
        for row in session.info.pop(self, ()):
            if isinstance(row, Attempt):
                cause = "none" if row.cause is None else row.cause.value
                self._attempts.labels("none" if row.outcome is None else row.outcome.value, cause).inc()
                self._steps_lost.labels(cause).inc(row.steps_lost or 0)
                self._compared.inc(redone_of(row.redone).compared)
            elif isinstance(row, Event):
                self._differences.inc()
            else:
                self._sizes.observe(row.size)
                for instrument, seconds in ((self._saves, row.seconds), (self._stalls, row.stall)):
                    if seconds is not None:
                        instrument.observe(seconds)

    def render(self, database: Database) -> bytes:
        """Return all metrics of this process in Prometheus' text format. Some counts may be minutes old. Raises SQLAlchemy's
        errors."""
        with database.read() as session:
            self._count_jobs(session, database)
            self._measure_queue(session, database)
        pool = database.engine.pool
        if isinstance(pool, QueuePool):
            self._pool.labels("in_use").set(pool.checkedout())
            self._pool.labels("idle").set(pool.checkedin())
        return generate_latest(self._registry)

    def _count_jobs(self, session: Session, database: Database) -> None:
        """Set the number of jobs by phase. The count of ended jobs may be up to two minutes old."""
        age = None if self._ended_counted_at is None else self._clock() - self._ended_counted_at
        if age is None or age >= _MAX_AGE_SECONDS:
            self._count_ended(session)
        elif age >= _ENDED_SECONDS and self._count_lock.acquire(blocking=False):
            threading.Thread(
                target=self._count_in_background, args=(database,), name="ratchet-count", daemon=True
            ).start()
        for phase, number in (_count_by_phase(session, _OPEN_PHASES) | self._ended_jobs).items():
            self._jobs.labels(phase.value).set(number)

    def _count_in_background(self, database: Database) -> None:
        """Count ended jobs, and release the lock that the caller has acquired. A failure is logged."""
        try:
            with database.read() as session:
                self._count_ended(session)
        except SQLAlchemyError as error:  # the next scrape, or the one after, retries
            log.warning("jobs that have ended were not counted: %s", first_line(error))
        finally:
            self._count_lock.release()

    def _count_ended(self, session: Session) -> None:
        """Count the ended jobs by phase, and store the result with its time."""
        now = self._clock()
        self._ended_jobs, self._ended_counted_at = _count_by_phase(session, _ENDED_PHASES), now

    def _measure_queue(self, session: Session, database: Database) -> None:
        """For each reason to wait, set the number of queued jobs with this reason. Set also the longest time in seconds since the
        row of one of these jobs changed."""
        query = sa.select(Job.reason, sa.func.count(), sa.func.min(Job.updated_at)).where(Job.phase == JobPhase.QUEUED)
        found: dict[str, tuple[int, float]] = {}
        now = database.clock.now()
        for reason, number, since in session.execute(query.group_by(Job.reason)):
            name = "none" if reason is None else reason if reason in _REASONS else "other"
            before = found.get(name, (0, 0.0))
            found[name] = (before[0] + number, max(before[1], (now - since).total_seconds()))
        self._queue.clear()
        self._oldest_waits.clear()
        for name, (number, seconds) in found.items():
            self._queue.labels(name).set(number)
            self._oldest_waits.labels(name).set(max(0.0, seconds))


def _count_by_phase(session: Session, phases: tuple[JobPhase, ...]) -> dict[JobPhase, int]:
    """Return the number of jobs in each of ``phases``, with 0 for phases without jobs."""
    query = sa.select(Job.phase, sa.func.count()).where(Job.phase.in_(phases)).group_by(Job.phase)
    return dict.fromkeys(phases, 0) | {phase: number for phase, number in session.execute(query)}  # noqa: C416
