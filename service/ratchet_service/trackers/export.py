"""Sends what ``plan`` decides to the experiment trackers, each tracker in a thread of its own.

A batch is stored, then sent, then recorded with the sink's state. If the process is killed before it is recorded, the next one
sends the same batch again. A tracker that does not answer costs nothing but rows in the outbox: the batch is tried again with
growing pauses. One process exports to a tracker at a time: it holds the lease in the tracker's row, and checks it in each
transaction.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Final, NamedTuple

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from ratchet_contract.errors import NotFound
from ratchet_contract.phases import EventType
from ratchet_service.db import leases, rounds
from ratchet_service.db.engine import Database, first_line
from ratchet_service.db.leases import NO_LEASE, LeaseLost
from ratchet_service.db.models import Job, Tracker, TrackerRun
from ratchet_service.db.sanitize import sanitize_text
from ratchet_service.db.transitions import add_event, lock_job
from ratchet_service.trackers import plan
from ratchet_service.trackers.plan import JobFacts
from ratchet_service.trackers.sink import Batch, Run, Sink, State, TrackerError

log = logging.getLogger(__name__)

_ROUND_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 5.0
_LEASE_SECONDS: Final = 300.0
"""Renewed before each call of a sink, and during a long one."""
_MAX_PAUSE: Final = 300.0
EVENT_AFTER: Final = 6
"""Failures in a row, after about a minute, that add an event to the job's history."""


def pause_after(failures: int) -> float:
    """Return the seconds until the next try: 2, 4, 8, ..., at most five minutes, without the jitter."""
    return min(2.0**failures, _MAX_PAUSE)


class _Key(NamedTuple):
    """The primary key of a ``TrackerRun``."""

    job_id: str
    sink: str
    number: int


class Exporter:
    """Exports the jobs of a database to ``sinks``."""

    def __init__(self, database: Database, sinks: Sequence[Sink], facts: JobFacts) -> None:
        self._database, self._sinks, self._facts = database, sinks, facts
        self._owner = leases.new_owner()
        self._tokens: dict[str, str] = {}  # of the leases that this process has, by the sink's name
        self._stopping = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Export during the block. At its end each tracker gets some seconds for what a job that has just ended left."""
        self._log_missing()
        threads = [
            threading.Thread(target=self._run, args=(sink,), name=sink.name, daemon=True) for sink in self._sinks
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            for thread in threads:
                thread.join(_STOP_SECONDS)

    def _log_missing(self) -> None:
        """Warn of jobs whose values wait for trackers that this service does not have."""
        waiting = sa.select(TrackerRun.sink, sa.func.count(TrackerRun.job_id.distinct())).group_by(TrackerRun.sink)
        waiting = waiting.where(TrackerRun.done.is_(False), TrackerRun.sink.not_in([sink.name for sink in self._sinks]))
        with self._database.read() as session:
            for name, jobs in session.execute(waiting):
                log.warning(
                    "this service has no tracker %s: values are kept for it, of this number of jobs: %d", name, jobs
                )

    def _run(self, sink: Sink) -> None:
        """Export to one tracker until the end of ``running``, and once more. Errors are logged."""
        work = partial(self.run_round, sink)
        rounds.run_rounds(sink.name, work, self._stopping)
        rounds.log_errors(sink.name, work)
        try:
            self._release(sink.name)
        except SQLAlchemyError as error:
            log.warning("%s: its lease ends in %.0f s: %s", sink.name, _LEASE_SECONDS, first_line(error))

    def run_round(self, sink: Sink) -> None:
        """Send to one tracker what is to be sent now: a batch of each run by turns, so that one which had to wait for days delays
        the others by a batch. Do nothing while another process has the lease."""
        due = self._due(sink.name)
        if due and self._has_lease(sink.name):
            until = time.monotonic() + _ROUND_SECONDS
            while due and time.monotonic() < until:  # then other runs may be due, too
                due = [key for key in due if self._export(sink, key)]

    def _due(self, name: str) -> list[_Key]:
        """Return the runs with a batch that may be tried now, or whose job has changed."""
        columns = (
            TrackerRun.job_id, TrackerRun.number, TrackerRun.live, TrackerRun.seen, TrackerRun.next_try,
            TrackerRun.batch.is_not(None).label("planned"), Job.phase, Job.attempt, Job.committed_step,
            Job.committed_attempt, Job.updated_at,
        )  # fmt: skip
        query = sa.select(*columns).join(Job, Job.id == TrackerRun.job_id)
        query = query.where(TrackerRun.sink == name, TrackerRun.done.is_(False)).order_by(
            TrackerRun.job_id, TrackerRun.number
        )
        out = []
        with self._database.read() as session:
            now = leases.database_now(session)
            latest = now + timedelta(seconds=2 * _MAX_PAUSE)  # a later time was written before the clock was set back
            for row in session.execute(query):
                waits = row.next_try is not None and now < row.next_try <= latest
                if not waits and (row.planned or row.seen != plan.signature(row, row.live)):
                    out.append(_Key(row.job_id, name, row.number))
        return out

    def _has_lease(self, name: str) -> bool:
        """Take the tracker's lease unless another living process has it; return True if this process has it."""
        with self._database.write() as session:
            row = session.get(Tracker, name, with_for_update=True)
            if row is None:
                row = Tracker(name=name)
                session.add(row)
                session.flush()
            if row.lease_token is not None and row.lease_token == self._tokens.get(name):
                return True
            expired = leases.is_expired(row.lease_token, row.lease_expires_at, leases.database_now(session))
            if not expired and not leases.owner_is_dead(row.lease_owner):
                return False
            for key, value in leases.lease_values(session, self._owner, _LEASE_SECONDS).items():
                setattr(row, key, value)
            self._tokens[name] = str(row.lease_token)
            return True

    def _lock(self, session: Session, key: _Key) -> tuple[Job, TrackerRun] | None:
        """Renew the lease, and return the job, locked, with the row of its run; None if it was deleted. Raise ``LeaseLost``."""
        mine = (Tracker.name == key.sink) & (Tracker.lease_token == self._tokens.get(key.sink))
        row = session.scalar(sa.select(Tracker).where(mine).with_for_update())
        if row is None:
            self._tokens.pop(key.sink, None)
            raise LeaseLost(f"{key.sink}: another process exports to it")
        row.lease_expires_at = leases.database_now(session) + timedelta(seconds=_LEASE_SECONDS)
        try:
            job = lock_job(session, key.job_id)
        except NotFound:
            return None
        run = session.get(TrackerRun, (key.job_id, key.sink, key.number))
        return None if run is None else (job, run)

    def _release(self, name: str) -> None:
        """Give the lease back, if this process has it."""
        with self._database.write() as session:
            mine = (Tracker.name == name) & (Tracker.lease_token == self._tokens.get(name))
            session.execute(sa.update(Tracker).where(mine).values(**NO_LEASE))

    def _export(self, sink: Sink, key: _Key) -> bool:
        """Send the run's next batch, and record the result. Return False if nothing is left to send now, or after a failure."""
        try:
            planned = self._plan(key)
            if planned is None:
                return False
            run, state, batch = planned
            with self._renewing_lease(sink.name):
                state = sink.export(run, state, batch)
        except TrackerError as error:
            self._record_failure(key, str(error))
            return False
        except (LeaseLost, SQLAlchemyError):
            raise
        except Exception as error:  # such as one of the tracker's own code: it concerns this run alone
            log.exception("%s: %s", sink.name, key.job_id)
            self._record_failure(key, f"{type(error).__name__}: {error}")
            return False
        return self._record(key, batch, state)

    @contextmanager
    def _renewing_lease(self, name: str) -> Iterator[None]:
        """Keep the tracker's lease during the block. The directory of a long W&B run takes minutes."""
        over = threading.Event()
        mine = (Tracker.name == name) & (Tracker.lease_token == self._tokens.get(name))

        def renew() -> None:
            while not over.wait(_LEASE_SECONDS / 3):
                try:
                    with self._database.write() as session:
                        until = leases.database_now(session) + timedelta(seconds=_LEASE_SECONDS)
                        session.execute(sa.update(Tracker).where(mine).values(lease_expires_at=until))
                except SQLAlchemyError as error:
                    log.warning("%s: its lease was not renewed: %s", name, first_line(error))

        thread = threading.Thread(target=renew, name=f"{name}-lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _plan(self, key: _Key) -> tuple[Run, State, Batch] | None:
        """Return what to send next, which is stored; None: nothing."""
        with self._database.write() as session:
            found = self._lock(session, key)
            batch = None if found is None else plan.plan(session, *found, self._facts)
            if found is None or batch is None:
                return None
            return plan.run_of(found[1]), found[1].state, batch

    def _record(self, key: _Key, batch: Batch, state: State) -> bool:
        """Store that the batch was sent. Return False if nothing is left to send now."""
        with self._database.write() as session:
            found = self._lock(session, key)
            if found is None:
                return False
            job, run = found
            if run.failures >= EVENT_AFTER:
                text = f"{key.sink} accepts the values of this job again: nothing was lost"
                add_event(session, job.id, EventType.TRACKER_BACK, text, data={"tracker": key.sink})
            run.failures, run.failing_since, run.next_try, run.error = 0, None, None, None
            return plan.record(session, job, run, batch, state)

    def _record_failure(self, key: _Key, error: str) -> None:
        """Store when the batch is tried again."""
        with self._database.write() as session:
            found = self._lock(session, key)
            if found is None:
                return
            job, run = found
            now = leases.database_now(session)
            run.failures, run.error = run.failures + 1, sanitize_text(error)[:1000]
            run.failing_since = run.failing_since or now
            run.next_try = now + timedelta(seconds=pause_after(run.failures) * random.uniform(0.9, 1.1))
            if run.failures == EVENT_AFTER:
                text = f"{key.sink} has not accepted the values of this job since {run.failing_since:%Y-%m-%d %H:%M:%S} UTC: "
                text += f"they are kept, and sent later. The last error: {run.error}"
                add_event(session, job.id, EventType.TRACKER_FAILING, text, data={"tracker": key.sink})
                log.warning("%s: %s", run.job_id, text)
