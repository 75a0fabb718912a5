"""The loop that makes what runs match what the database says.

Every round: renew our leases, take over active jobs that nobody looks after, start what there are slots for, look at every
attempt of ours. Any number of reconcilers may run side by side; each line may be the last one before a SIGKILL.
"""

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
from ratchet_service import disk, jumps, leases, steady
from ratchet_service.background import Background, Start, in_thread
from ratchet_service.bounds import DEFAULT_BOUNDS, Bounds
from ratchet_service.database import Database, first_line
from ratchet_service.decision import Decision
from ratchet_service.expiry import Expiry
from ratchet_service.health import Beat
from ratchet_service.instruments import Instruments
from ratchet_service.launchers.base import EngineUnreachable, attempt_name
from ratchet_service.launchers.table import Launchers
from ratchet_service.launching import Launched, Launching
from ratchet_service.leases import Lease, LeaseLost
from ratchet_service.log_format import about
from ratchet_service.models import Attempt, Job
from ratchet_service.queue_rows import launched_by
from ratchet_service.queueing import Preemption
from ratchet_service.slots import Capacity
from ratchet_service.watched import Timing, Watch, Wish, wishes
from ratchet_service.watching import Watcher

log = logging.getLogger(__name__)

ACTIVE_INTERVAL: Final = 0.2
ENDING_INTERVAL: Final = 0.03
"""While an agent has told its result and is about to exit: the next attempt waits for nothing else."""
IDLE_INTERVAL: Final = 1.0
_LOOKS_SHARE: Final = 0.2
"""Of a core, at the most, for looking at what runs: with some hundred attempts of one reconciler the looks become rarer, down to
one in ``_LOOKS_REST`` seconds. What an agent tells the service is not held up by that."""
_LOOKS_REST: Final = 2.0
_SHORT_LOOK: Final = 0.05
LEASE_SECONDS: Final = 15.0
_ERROR_PAUSE: Final = 1.0
_AT_END: Final = 5.0
"""Seconds that ends of attempts get at a clean end; the next reconciler makes the others again."""
_NOT_OURS: Final = (LeaseLost, NoResultFound)
"""While this process was held up, another has taken the job over; in the end its user may have deleted it."""
_OF_ALL: Final = (OperationalError, InterfaceError, InternalError, ProgrammingError, TimeoutError)
"""Of the database itself. Other errors are one job's: its row, its files, its engine."""


def rested(began: float, ended: float) -> float:
    """When the next look at what runs may be, behind one that took from ``began`` to ``ended``; seconds, monotonic."""
    took = ended - began
    return ended + (min(took * (1 / _LOOKS_SHARE - 1), _LOOKS_REST) if took > _SHORT_LOOK else 0.0)


class Reconciler:
    """``run`` in a thread (or the main one) until ``stop``. ``wake`` when something changed: it never blocks."""

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
        """``start``: how work beside the rounds begins."""
        self._database = database
        self._instruments = instruments or Instruments()
        self._home = home
        self._owner = leases.new_owner()
        self._lease_seconds = lease_seconds
        self._launchers = launchers
        self._launching = Launching(
            database, home, launchers, capacity, self._owner, lease_seconds, preemption or Preemption(), bounds
        )
        self._background = Background(database, lease_seconds, self.wake, start)
        self._watcher = Watcher(
            database, home, launchers, self._launching, timing or Timing(), lease_seconds, self._background, bounds
        )
        self._expiry = Expiry(database, home)
        self._watches: dict[str, Watch] = {}
        self._stopping = threading.Event()
        self._changed = threading.Event()
        self._jumps = jumps.Jumps(database.clock, jumps.MACHINE, database.clock.now)
        self._renewed = 0.0
        self._counts_kept = 0.0
        self._slots_kept = 0.0
        self._look_around_at = self._looks_at = 0.0
        self._expired = 0.0
        self._swept = False
        self.beat = Beat(home.reconciler_mark)

    def wake(self) -> None:
        """Look at the queue now instead of at the end of the pause."""
        self._changed.set()

    def stop(self) -> None:
        """Let ``run`` end after the current round."""
        self._stopping.set()
        self._changed.set()

    def run(self) -> None:
        """Until ``stop``; then the leases are given back. What the agents do is not touched. Faults are logged and survived."""
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                pause = self.round()
            except Exception as error:
                self._say(error)
                self.beat.failed(error)
                self._instruments.round(time.monotonic() - began, True)
                self._stopping.wait(_ERROR_PAUSE)  # whatever wakes it: it would fail again
            else:
                now = self._database.clock.monotonic()
                self.beat.round([now - since for since in self._background.jobs.values()])
                self._instruments.round(time.monotonic() - began, False)
                self._changed.wait(pause)
        self._background.wait(_AT_END)
        self._give_back()

    def _say(self, error: Exception) -> None:
        if not isinstance(error, SQLAlchemyError):
            log.error("a round of the reconciler failed, trying again", exc_info=error)
            return
        full = disk.without_room(self._database) if disk.is_full(error, self._home.home) else None
        why = full.detail if full is not None else f"the database does not answer: {first_line(error)}"
        log.error("trying again: %s", why)

    def round(self) -> float:
        """One round; seconds until the next one is due."""
        now = self._database.clock.monotonic()
        woken = self._changed.is_set()
        self._changed.clear()
        self._renew(now)
        self._see_jump(self._jumps.look())
        if not self._swept:  # before slots are lent that something still uses which no row knows
            self._sweep()
            self._swept = True
        if woken or now >= self._look_around_at:
            self._take_over()
            self._launch()
            self._look_around_at = now + self._until_next()
        if self._watches and now >= self._looks_at:
            began = self._database.clock.monotonic()
            self._look()
            self._looks_at = rested(began, self._database.clock.monotonic())
        if now - self._expired >= self._expiry.interval:
            self._expired = now
            self._background.aside("expiry", self._expiry.run)
            self._launching.tell_the_others()
            self._sweep()
        now = self._database.clock.monotonic()
        pause = max(self._interval(), self._looks_at - now)
        return max(0.0, min(pause, self._look_around_at - now))

    def _interval(self) -> float:
        if not self._watches:
            return IDLE_INTERVAL
        now = self._database.clock.monotonic()
        ending = any(
            (watch.result_seen_at is not None or watch.ending_since is not None)
            and watch.end is None  # which wakes this thread, also for those that wait for it
            and watch.evidence is None
            and watch.paused_until <= now
            for watch in self._watches.values()
        )
        return ENDING_INTERVAL if ending else ACTIVE_INTERVAL

    def _renew(self, now: float) -> None:
        if now - self._slots_kept >= self._lease_seconds / 4:
            self._launching.keep_slots()
            self._slots_kept = now
        if not self._watches or now - self._renewed < self._lease_seconds / 4:
            return
        keeps = now - self._counts_kept >= steady.KEEP_SECONDS
        with self._database.write() as session:
            renewed = leases.renew(session, [w.lease for w in self._watches.values()], self._lease_seconds)
            self._watcher.keep(session, [self._watches[job_id] for job_id in renewed], runs=keeps)
        for job_id in renewed:
            self._watches[job_id].held_at = now
        self._renewed = now
        self._background.keep_leases()
        if keeps:
            self._counts_kept = now

    def _see_jump(self, seconds: float | None) -> None:
        """The wall clock was set, or this machine stood still: no deadline goes by it, but times at which jobs are tried again
        do, and the history of what runs is to tell. Where the database does not answer, the next round does it."""
        if seconds == 0.0:
            return
        if seconds is None:
            with self._database.read() as session:
                if self._jumps.learn(session):
                    return
        with self._database.write() as session:
            seen = self._jumps.settle(session)
            if seen.fresh != 0.0:
                self._launching.put_off(session, seen.fresh)
            lost = self._watcher.tell_jump(session, self._watches.values(), seconds) if seconds is not None else []
        self._jumps.settled(seen)
        for watch in lost:
            log.info("%s: looked after by another reconciler now", watch.ref.name)
            del self._watches[watch.lease.job_id]
        jump = seen.fresh if seconds is None else seconds
        if jump != 0.0:
            log.warning("the wall clock jumped by %+.0f s: deadlines go on by the monotonic one", jump)
            self.beat.jumped(jump)

    def _take_over(self) -> None:
        with self._database.read() as session:
            # an end that lost its lease has to be over first
            known = self._watches.keys() | self._background.jobs.keys()
            free = leases.free_jobs(session, known, launched_by(self._launchers))
        for found in free:
            held_at = self._database.clock.monotonic()
            with self._database.write() as session:
                lease = leases.take(session, found, self._owner, self._lease_seconds)
            if lease is not None:
                with about(job_id=lease.job_id, attempt=lease.epoch):
                    self._taken_over(lease, held_at)

    def _taken_over(self, lease: Lease, held_at: float) -> None:
        log.info("%s, attempt %d: taken over", lease.job_id, lease.epoch)
        self._instruments.taken_over()
        try:
            self._watches[lease.job_id] = self._watcher.begin(lease, held_at)
        except NoResultFound:
            log.info("%s, attempt %d: ended and deleted meanwhile", lease.job_id, lease.epoch)
        except _OF_ALL:
            raise
        except Exception as error:  # rows of another version, perhaps. It is tried again when the lease has run out
            with suppress(LeaseLost):
                self._watcher.tell(lease, error)

    def _launch(self) -> None:
        held_at = self._database.clock.monotonic()
        for launched in self._launching.launch_ready():
            with about(job_id=launched.lease.job_id, attempt=launched.lease.epoch):
                self._launched(launched, held_at)

    def _launched(self, launched: Launched, held_at: float) -> None:
        job_id, epoch, _ = launched.lease
        try:
            watch = self._watches[job_id] = self._watcher.begin(launched.lease, held_at)
            if launched.plan is None:
                log.warning("%s: on the disk, and not in the database: taken in", watch.ref.name)
                return
            log.info("%s: launching", watch.ref.name)
            self._watcher.submit(watch, launched.plan)
        except _NOT_OURS as error:
            log.info("%s, attempt %d: not launched by this process: %s", job_id, epoch, error)
            self._watches.pop(job_id, None)
        except _OF_ALL:
            raise
        except Exception as error:  # the others that were launched must be looked after, too
            with suppress(LeaseLost):
                self._watcher.tell(launched.lease, error)

    def _look(self) -> None:
        now = self._database.clock.monotonic()
        watches = {job_id: watch for job_id, watch in self._watches.items() if watch.paused_until <= now}
        for job_id, watch in list(watches.items()):
            if watch.end is not None:  # whose lease goes with it
                del watches[job_id]
                with about(job_id=job_id, attempt=watch.lease.epoch):
                    self._look_at(job_id, watch, partial(self._watcher.ended, watch))
        current = self._wishes(watches)
        for job_id, watch in watches.items():
            wish = current.get(job_id)
            if watch.paused_until > now:
                continue
            if wish is None:
                log.info("%s: looked after by another reconciler now", watch.ref.name)
                del self._watches[job_id]
                continue
            with about(job_id=job_id, attempt=watch.lease.epoch):
                self._look_at(job_id, watch, partial(self._watcher.look, watch, wish))

    def _wishes(self, watches: Mapping[str, Watch]) -> dict[str, Wish]:
        """Read at once; where one of the rows is of another version, one by one, so that the others are looked after."""
        try:
            with self._database.read() as session:
                return wishes(session, [w.lease for w in watches.values()])
        except (LookupError, ValueError):
            found: dict[str, Wish] = {}
        for job_id, watch in watches.items():
            try:
                with self._database.read() as session:
                    found |= wishes(session, [watch.lease])
            except (LookupError, ValueError) as error:
                self._failed(job_id, watch, error)
        return found

    def _look_at(self, job_id: str, watch: Watch, look: Callable[[], Decision | None]) -> None:
        try:
            decision = look()
            if decision is None and watch.ending_since is None:  # else its end may fail as it did before
                self._watcher.healed(watch)
        except _NOT_OURS as error:
            self._lost(job_id, watch, error)
            return
        except _OF_ALL:
            raise
        except Exception as error:
            self._failed(job_id, watch, error)
            return
        if decision is not None:
            del self._watches[job_id]
            self._changed.set()  # its slots are free

    def _failed(self, job_id: str, watch: Watch, error: Exception) -> None:
        """The others are looked after, and this one again after a pause."""
        try:
            self._watcher.failed(watch, error)
        except _NOT_OURS as lost:
            self._lost(job_id, watch, lost)

    def _lost(self, job_id: str, watch: Watch, error: Exception) -> None:
        log.info("%s: not looked after any more: %s", watch.ref.name, error)
        del self._watches[job_id]

    def _sweep(self) -> None:
        """End what engines run under our name and no active attempt knows: left by a crash between two services, or by hand."""
        for kind, launcher in self._launchers.items():
            try:
                ended = launcher.sweep(self._known)
            except EngineUnreachable as error:
                log.warning("%s was not swept: %s", kind, error.detail)
                continue
            for name in ended:
                log.warning("%s: %s ran, and no attempt knows it: ended", kind, name)

    def _known(self, names: Collection[str]) -> set[str]:
        """Which of these names (``AttemptRef.name``) belong to attempts that have not ended."""
        query = sa.select(Attempt.job_id, Attempt.number).where(Attempt.phase != AttemptPhase.ENDED)
        with self._database.read() as session:
            rows = session.execute(query.where(Attempt.job_id.in_({name.rpartition("-a")[0] for name in names})))
            return {attempt_name(job_id, number) for job_id, number in rows}

    def _until_next(self) -> float:
        """Seconds until a queued job's time comes, at most ``IDLE_INTERVAL``: other processes wake nobody here."""
        now = self._database.clock.now()
        query = sa.select(sa.func.min(Job.not_before)).where(Job.phase == JobPhase.QUEUED, Job.not_before > now)
        with self._database.read() as session:
            due = session.scalar(query)
        if due is None:
            return IDLE_INTERVAL
        return min(IDLE_INTERVAL, max(0.0, (due - now).total_seconds()))

    def _give_back(self) -> None:
        at_work = self._background.jobs
        held: list[Lease] = [w.lease for w in self._watches.values() if w.lease.job_id not in at_work]
        try:
            self._launching.leave_slots()
            if held:
                with self._database.write() as session:
                    leases.release(session, held)
        except SQLAlchemyError as error:
            log.warning("leases were not given back, they expire by themselves: %s", first_line(error))
