"""The reconciler's loop. In rounds it launches, supervises and ends attempts, so that what runs matches the database. Any number
of reconcilers may run concurrently. Each may be killed by SIGKILL after any line."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import sqlalchemy as sa
from sqlalchemy.exc import (
    InterfaceError,
    InternalError,
    NoResultFound,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
    TimeoutError,
)

from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import AttemptPhase, JobPhase
from ratchet_service.config.output_limits import DEFAULT_BOUNDS, Bounds
from ratchet_service.db import leases
from ratchet_service.db.engine import Database, first_line
from ratchet_service.db.leases import Lease, LeaseLost
from ratchet_service.db.models import Attempt, Job
from ratchet_service.launchers.base import EngineUnreachable, attempt_name
from ratchet_service.launchers.registry import Launchers
from ratchet_service.lifecycle import monotonic_deadlines
from ratchet_service.lifecycle.decision import Decision
from ratchet_service.lifecycle.supervision import DesiredState, Timing
from ratchet_service.observability import disk_space
from ratchet_service.observability.health import ReconcilerHeartbeat
from ratchet_service.observability.logging import log_fields
from ratchet_service.observability.metrics import Instruments
from ratchet_service.reconciler.attempt_watch import Watch, read_desired_states
from ratchet_service.reconciler.background_work import Background, Start, in_thread
from ratchet_service.reconciler.launch import AttemptLauncher, Launched
from ratchet_service.reconciler.supervise import Watcher
from ratchet_service.reconciler.ttl import Expiry
from ratchet_service.scheduling.queue_queries import launched_by
from ratchet_service.scheduling.scheduler import Preemption
from ratchet_service.scheduling.slots import Capacity

log = logging.getLogger(__name__)

ACTIVE_INTERVAL: Final = 0.2
ENDING_INTERVAL: Final = 0.03
"""The longest pause while an attempt is about to end, as after its agent has written its result: a next attempt waits for that
end. The first pauses are shorter, since most agents end at once."""
_FIRST_ENDING_INTERVAL: Final = 0.003
IDLE_INTERVAL: Final = 1.0
_MAX_POLL_SHARE: Final = 0.2
"""Share of the time for polling attempts, once a poll of all takes long, as with some hundred attempts: a pause of at most
``_MAX_POLL_PAUSE`` seconds follows it. That does not delay agents' reports to the service."""
_MAX_POLL_PAUSE: Final = 2.0
_SHORT_POLL_SECONDS: Final = 0.05
LEASE_SECONDS: Final = 15.0
_ERROR_PAUSE: Final = 1.0
_EXIT_WAIT_SECONDS: Final = 5.0
"""Seconds that attempts being finalised get at a clean exit; the next reconciler finalises the others."""
_LEASE_LOST_ERRORS: Final = (LeaseLost, NoResultFound)
"""While this process was suspended, another has taken the job over; later its user may even have deleted it."""
_DATABASE_ERRORS: Final = (OperationalError, InterfaceError, InternalError, ProgrammingError, TimeoutError)
"""Errors of the database itself. Other errors concern one job: its row, its files, its engine."""


def next_poll_at(began: float, ended: float) -> float:
    """Return the earliest time of the next poll, after one from ``began`` to ``ended`` (monotonic); after a long poll there is
    a pause."""
    took = ended - began
    return ended + (min(took * (1 / _MAX_POLL_SHARE - 1), _MAX_POLL_PAUSE) if took > _SHORT_POLL_SECONDS else 0.0)


class Reconciler:
    """One reconciler of this process. ``run`` runs its rounds until ``stop`` is called; ``wake`` starts the next round early."""

    def __init__(
        self,
        database: Database,
        home: HomePaths,
        launchers: Launchers,
        capacity: Capacity,
        *,
        timing: Timing | None = None,
        lease_seconds: float = LEASE_SECONDS,
        preemption: Preemption | None = None,
        bounds: Bounds = DEFAULT_BOUNDS,
        instruments: Instruments | None = None,
        start: Start = in_thread,
    ) -> None:
        """Start nothing yet. ``launchers``: only their jobs are started and supervised. ``capacity``: the slots that this
        machine lends. ``start``: starts background work."""
        self._database = database
        self._instruments = instruments or Instruments()
        self._home = home
        self._owner = leases.new_owner()
        self._lease_seconds = lease_seconds
        self._launchers = launchers
        self._attempt_launcher = AttemptLauncher(
            database, home, launchers, capacity, self._owner, lease_seconds, preemption or Preemption(), bounds
        )
        self._background = Background(database, lease_seconds, self.wake, start)
        self._watcher = Watcher(
            database,
            home,
            launchers,
            self._attempt_launcher,
            timing or Timing(),
            lease_seconds,
            self._background,
            bounds,
        )
        self._expiry = Expiry(database, home)
        self._watches: dict[str, Watch] = {}
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._renewed_at = 0.0
        self._counts_stored_at = 0.0
        self._slots_renewed_at = 0.0
        self._next_queue_pass_at = self._next_poll_at = 0.0
        self._expiry_ran_at = 0.0
        self._swept = False
        self.heartbeat = ReconcilerHeartbeat(home.reconciler_marker)

    def wake(self) -> None:
        """Make the next round start early, unless the last one failed, and process the queue. Never blocks; any thread may call
        it."""
        self._changed.set()

    def stop(self) -> None:
        """Make ``run`` return after the current round. Does not wait for that; any thread may call it."""
        self._stopping.set()
        self._changed.set()

    def run(self) -> None:
        """Run rounds until ``stop``; blocks. Then wait at most a few seconds for background work, and release leases."""
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                pause = self.run_round()
            except Exception as error:
                self._log_error(error)
                self.heartbeat.record_failure(error)
                self._instruments.observe_round(time.monotonic() - began, True)
                self._stopping.wait(_ERROR_PAUSE)  # even if ``wake`` is called: it would fail again
            else:
                now = self._database.clock.monotonic()
                self.heartbeat.record_round([now - since for since in self._background.finishing_jobs.values()])
                self._instruments.observe_round(time.monotonic() - began, False)
                self._changed.wait(pause)
        self._background.wait(_EXIT_WAIT_SECONDS)
        self._release_leases()

    def _log_error(self, error: Exception) -> None:
        """Log an error of a round: a database error on one line, any other with its traceback."""
        if not isinstance(error, SQLAlchemyError):
            log.error("a round of the reconciler failed, trying again", exc_info=error)
            return
        full = (
            disk_space.database_disk_full(self._database)
            if disk_space.is_disk_full_error(error, self._home.home)
            else None
        )
        why = full.detail if full is not None else f"the database does not answer: {first_line(error)}"
        log.error("trying again: %s", why)

    def run_round(self) -> float:
        """Run one round and return the seconds until the next. Errors of one attempt are recorded; errors of the database are
        raised."""
        now = self._database.clock.monotonic()
        woken = self._changed.is_set()
        self._changed.clear()
        self._renew_leases(now)
        if not self._swept:  # before slots are lent that a process unknown to the database still uses
            self._sweep()
            self._swept = True
        if woken or now >= self._next_queue_pass_at:
            self._take_over()
            self._launch()
            self._next_queue_pass_at = now + self._seconds_to_next_backoff_end()
        if self._watches and now >= self._next_poll_at:
            began = self._database.clock.monotonic()
            self._poll_attempts()
            self._next_poll_at = next_poll_at(began, self._database.clock.monotonic())
        if now - self._expiry_ran_at >= self._expiry.interval:
            self._expiry_ran_at = now
            self._background.run_housekeeping("expiry", self._expiry.run)
            self._attempt_launcher.mark_unlaunchable_jobs()
            self._sweep()
        now = self._database.clock.monotonic()
        pause = max(self._poll_interval(), self._next_poll_at - now)
        return max(0.0, min(pause, self._next_queue_pass_at - now))

    def _poll_interval(self) -> float:
        """Return the seconds until attempts should be polled next; short while an attempt is about to end."""
        if not self._watches:
            return IDLE_INTERVAL
        now = self._database.clock.monotonic()
        ending = [
            since
            for watch in self._watches.values()
            for since in (watch.known.result_seen_at, watch.known.ending_since)
            if since is not None
            and watch.finish_future is None  # else its completion wakes this thread, also for those that wait for it
            and watch.evidence is None
            and watch.paused_until <= now
        ]
        if not ending:
            return ACTIVE_INTERVAL
        return min(max(_FIRST_ENDING_INTERVAL, (now - max(ending)) / 2), ENDING_INTERVAL)

    def _renew_leases(self, now: float) -> None:
        """Renew the leases of the slots and of the watched jobs when due, and store the attempts' deadlines. ``now``:
        monotonic."""
        if now - self._slots_renewed_at >= self._lease_seconds / 4:
            self._attempt_launcher.renew_slots()
            self._slots_renewed_at = now
        if not self._watches or now - self._renewed_at < self._lease_seconds / 4:
            return
        keeps = now - self._counts_stored_at >= monotonic_deadlines.KEEP_SECONDS
        with self._database.write() as session:
            renewed = leases.renew(session, [w.lease for w in self._watches.values()], self._lease_seconds)
            self._watcher.store_deadlines(session, [self._watches[job_id] for job_id in renewed], with_run_time=keeps)
        for job_id in renewed:
            self._watches[job_id].lease_held_at = now
        self._renewed_at = now
        self._background.ensure_lease_renewal()
        if keeps:
            self._counts_stored_at = now

    def _take_over(self) -> None:
        """Take the leases of active jobs of this process's launchers that no reconciler holds, and start to watch these jobs."""
        with self._database.read() as session:
            # an attempt that is being finalised, but whose lease was lost, must be done first
            known = self._watches.keys() | self._background.finishing_jobs.keys()
            free = leases.free_jobs(session, known, launched_by(self._launchers))
        for found in free:
            held_at = self._database.clock.monotonic()
            with self._database.write() as session:
                lease = leases.acquire(session, found, self._owner, self._lease_seconds)
            if lease is not None:
                with log_fields(job_id=lease.job_id, attempt=lease.attempt):
                    self._watch_taken_over(lease, held_at)

    def _watch_taken_over(self, lease: Lease, held_at: float) -> None:
        """Start to watch a job that was taken over, or record the error. Only the database's errors are raised. ``held_at``:
        monotonic time just before its lease was taken."""
        log.info("%s, attempt %d: taken over", lease.job_id, lease.attempt)
        self._instruments.count_takeover()
        try:
            self._watches[lease.job_id] = self._watcher.start_watch(lease, held_at)
        except NoResultFound:
            log.info("%s, attempt %d: ended and deleted meanwhile", lease.job_id, lease.attempt)
        except _DATABASE_ERRORS:
            raise
        except Exception as error:  # perhaps rows of another version; retried when the lease has expired
            with suppress(LeaseLost):
                self._watcher.record_error(lease, error)

    def _launch(self) -> None:
        """Create attempts for queued jobs that can start, start to watch them, and submit their plans to their launchers."""
        held_at = self._database.clock.monotonic()
        for launched in self._attempt_launcher.launch_ready():
            with log_fields(job_id=launched.lease.job_id, attempt=launched.lease.attempt):
                self._watch_launched(launched, held_at)

    def _watch_launched(self, launched: Launched, held_at: float) -> None:
        """Start to watch a new attempt and submit it, unless it was found on the disk. Only the database's errors are raised.
        ``held_at``: monotonic time before its lease was taken."""
        job_id, attempt, _ = launched.lease
        try:
            watch = self._watches[job_id] = self._watcher.start_watch(launched.lease, held_at)
            if launched.plan is None:
                log.warning("%s: on the disk, but not in the database: adopted", watch.ref.name)
                return
            log.info("%s: launching", watch.ref.name)
            self._watcher.submit(watch, launched.plan)
        except _LEASE_LOST_ERRORS as error:
            log.info("%s, attempt %d: not launched by this process: %s", job_id, attempt, error)
            self._watches.pop(job_id, None)
        except _DATABASE_ERRORS:
            raise
        except Exception as error:  # the others that were launched must be supervised, too
            with suppress(LeaseLost):
                self._watcher.record_error(launched.lease, error)

    def _poll_attempts(self) -> None:
        """Poll every watched attempt that is not paused. An attempt that is being finalised is not polled; its result is taken if
        it is there. Drop the watches of jobs that this process no longer holds."""
        now = self._database.clock.monotonic()
        watches = {job_id: watch for job_id, watch in self._watches.items() if watch.paused_until <= now}
        for job_id, watch in list(watches.items()):
            if watch.finish_future is not None:  # the finalisation also releases the lease
                del watches[job_id]
                with log_fields(job_id=job_id, attempt=watch.lease.attempt):
                    self._poll_attempt(job_id, watch, partial(self._watcher.finish_result, watch))
        current = self._desired_states(watches)
        for job_id, watch in watches.items():
            desired_state = current.get(job_id)
            if watch.paused_until > now:
                continue
            if desired_state is None:
                log.info("%s: now supervised by another reconciler", watch.ref.name)
                del self._watches[job_id]
                continue
            with log_fields(job_id=job_id, attempt=watch.lease.attempt):
                self._poll_attempt(job_id, watch, partial(self._watcher.poll, watch, desired_state))

    def _desired_states(self, watches: Mapping[str, Watch]) -> dict[str, DesiredState]:
        """Return job id -> desired state of those jobs of ``watches`` that this process still holds and can read."""
        try:
            with self._database.read() as session:
                return read_desired_states(session, [w.lease for w in watches.values()])
        except (LookupError, ValueError):
            found: dict[str, DesiredState] = {}
        for job_id, watch in watches.items():
            try:
                with self._database.read() as session:
                    found |= read_desired_states(session, [watch.lease])
            except (LookupError, ValueError) as error:
                self._record_failure(job_id, watch, error)
        return found

    def _poll_attempt(self, job_id: str, watch: Watch, poll: Callable[[], Decision | None]) -> None:
        """Call ``poll``, and record errors that concern the attempt. After its final decision or a lost lease, the watch is
        dropped."""
        try:
            decision = poll()
            if decision is None and watch.known.ending_since is None:  # otherwise its end may fail as before
                self._watcher.record_recovery(watch)
        except _LEASE_LOST_ERRORS as error:
            self._drop_watch(job_id, watch, error)
            return
        except _DATABASE_ERRORS:
            raise
        except Exception as error:
            self._record_failure(job_id, watch, error)
            return
        if decision is not None:
            del self._watches[job_id]
            self._changed.set()  # its slots are free

    def _record_failure(self, job_id: str, watch: Watch, error: Exception) -> None:
        """Record the error of one attempt, which is then not polled for some time, or drop its watch."""
        try:
            self._watcher.record_failure(watch, error)
        except _LEASE_LOST_ERRORS as lost:
            self._drop_watch(job_id, watch, lost)

    def _drop_watch(self, job_id: str, watch: Watch, error: Exception) -> None:
        """Stop watching the job, since this process no longer holds it."""
        log.info("%s: no longer supervised: %s", watch.ref.name, error)
        del self._watches[job_id]

    def _sweep(self) -> None:
        """Make every launcher end the attempts of this service that run on its engine but are not active in the database."""
        for kind, launcher in self._launchers.items():
            try:
                ended = launcher.sweep(self._known_attempts)
            except EngineUnreachable as error:
                log.warning("%s was not swept: %s", kind, error.detail)
                continue
            for name in ended:
                log.warning("%s: %s ran without a known attempt: ended", kind, name)

    def _known_attempts(self, names: Collection[str]) -> set[str]:
        """Return the names of all attempts that have not ended and whose jobs have an attempt in ``names``. A name is
        ``AttemptRef.name``."""
        query = sa.select(Attempt.job_id, Attempt.number).where(Attempt.phase != AttemptPhase.ENDED)
        with self._database.read() as session:
            rows = session.execute(query.where(Attempt.job_id.in_({name.rpartition("-a")[0] for name in names})))
            return {attempt_name(job_id, number) for job_id, number in rows}

    def _seconds_to_next_backoff_end(self) -> float:
        """Return the seconds until the next back-off of a queued job ends, at most ``IDLE_INTERVAL``."""
        now = self._database.clock.now()
        query = sa.select(sa.func.min(Job.not_before)).where(Job.phase == JobPhase.QUEUED, Job.not_before > now)
        with self._database.read() as session:
            due = session.scalar(query)
        if due is None:
            return IDLE_INTERVAL
        # other processes that add jobs do not wake this one
        return min(IDLE_INTERVAL, max(0.0, (due - now).total_seconds()))

    def _release_leases(self) -> None:
        """Release the leases of watched jobs that are not being finalised, at a clean exit, and shorten that of the slots.
        Database errors are logged."""
        at_work = self._background.finishing_jobs
        held: list[Lease] = [w.lease for w in self._watches.values() if w.lease.job_id not in at_work]
        try:
            self._attempt_launcher.shorten_slot_lease()
            if held:
                with self._database.write() as session:
                    leases.release(session, held)
        except SQLAlchemyError as error:
            log.warning("leases were not released and will expire: %s", first_line(error))
