"""Slow work in background threads, concurrently with the reconciler's rounds: finalisations of attempts, and housekeeping.
Work that ends with the process is started again by the next one."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from ratchet_service.db import leases
from ratchet_service.db.engine import Database, first_line
from ratchet_service.db.leases import Lease
from ratchet_service.observability.health import MAX_CONCURRENT_FINISHES

log = logging.getLogger(__name__)
T = TypeVar("T")
Start = Callable[[str, Callable[[], None]], None]


def in_thread(name: str, work: Callable[[], None]) -> None:
    """Start ``work`` in a daemon thread with the caller's logging context. Raise ``RuntimeError`` if no thread can be started."""
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name=name, daemon=True).start()


def in_caller(_name: str, work: Callable[[], None]) -> None:
    """Run ``work`` in the caller's thread and return when it is done; for simulations, which must be deterministic."""
    work()


class Background:
    """Runs finalisations and housekeeping in the background. ``wake`` is called after each finalisation. ``start``:
    ``in_thread``, or ``in_caller`` in simulations."""

    def __init__(
        self, database: Database, lease_seconds: float, wake: Callable[[], None], start: Start = in_thread
    ) -> None:
        self._database = database
        self._lease_seconds = lease_seconds
        self._wake = wake
        self._start = start
        self._changed = threading.Condition()
        self._finishing: dict[str, tuple[Lease, float]] = {}  # with the time at which it began
        self._renewing = False
        self._housekeeping: dict[str, bool] = {}  # kinds of housekeeping that run, and whether they are to run again

    @property
    def finishing_jobs(self) -> dict[str, float]:
        """Id of each job whose attempt is being finalised -> since when; seconds, monotonic. A copy."""
        with self._changed:
            return {job_id: began for job_id, (_, began) in self._finishing.items()}

    def start_finishing(self, lease: Lease, work: Callable[[], T]) -> Future[T] | None:
        """Run ``work``, which finalises an attempt, in the background, and return its future; None: too many run. The lease is
        renewed meanwhile. Raise what ``start`` raises."""
        with self._changed:
            if len(self._finishing) >= MAX_CONCURRENT_FINISHES:
                return None
            self._finishing[lease.job_id] = lease, self._database.clock.monotonic()
        future: Future[T] = Future()
        try:
            self._start(f"end of {lease.job_id}", partial(self._run_finish, lease, work, future))
        except Exception:
            self._mark_finished(lease)
            raise
        self.ensure_lease_renewal()
        return future

    def ensure_lease_renewal(self) -> None:
        """Start the thread that renews the leases of attempts being finalised, if it is needed and not running. Errors
        are only logged."""
        with self._changed:
            if not self._finishing or self._renewing:
                return
            self._renewing = True
        try:
            self._start("leases", self._renew)
        except Exception as error:
            with self._changed:
                self._renewing = False
            # the reconciler calls this periodically
            log.error("leases of attempts being finalised are renewed by the rounds only: %s", error)

    def _run_finish(self, lease: Lease, work: Callable[[], T], future: Future[T]) -> None:
        """Run ``work``, mark the job as no longer being finalised, put the result or error into ``future``, and call ``wake``."""
        try:
            value = work()
        except Exception as error:
            self._mark_finished(lease)
            future.set_exception(error)
        else:
            self._mark_finished(lease)
            future.set_result(value)
        self._wake()

    def _mark_finished(self, lease: Lease) -> None:
        """Remove the job from those that are being finalised: its lease is not renewed here any more."""
        with self._changed:
            self._finishing.pop(lease.job_id, None)
            self._changed.notify_all()

    def _renew(self) -> None:
        """Renew the leases of attempts being finalised; blocks until no attempt is being finalised. Errors are only logged."""
        # the lease was surely held when the work began, so the first renewal comes before it ends
        pause = self._lease_seconds * (1 - leases.SAFE_FRACTION) / 2
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._finishing, pause):
                    self._renewing = False
                    return
                held = [lease for lease, _ in self._finishing.values()]
            try:
                with self._database.write() as session:
                    leases.renew(session, held, self._lease_seconds)
            except SQLAlchemyError as error:
                log.warning("leases of attempts being finalised were not renewed: %s", first_line(error))
            except Exception:
                log.exception("leases of attempts being finalised were not renewed")

    def run_housekeeping(self, kind: str, work: Callable[[], None]) -> None:
        """Run ``work`` in the background, or have the running work of this kind run once more. Errors are only logged."""
        with self._changed:
            runs = kind in self._housekeeping
            self._housekeeping[kind] = True
        if runs:
            return
        try:
            self._start(kind, partial(self._run_until_done, kind, work))
        except Exception as error:
            log.error("%s was not started: %s", kind, error)
            with self._changed:
                self._housekeeping.pop(kind, None)
                self._changed.notify_all()

    def _run_until_done(self, kind: str, work: Callable[[], None]) -> None:
        """Run ``work``, and again as long as it was requested again meanwhile. Errors are logged."""
        while True:
            with self._changed:
                if not self._housekeeping[kind]:
                    del self._housekeeping[kind]
                    self._changed.notify_all()
                    return
                self._housekeeping[kind] = False
            try:
                work()
            except SQLAlchemyError as error:
                log.error("%s: the database does not answer: %s", kind, first_line(error))
            except Exception:
                log.exception("%s failed", kind)

    def wait(self, seconds: float) -> None:
        """Block until no finalisation and no housekeeping is running, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._finishing and not self._housekeeping, seconds)
