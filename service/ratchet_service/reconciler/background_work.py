"""Work that takes as long as a disk does, concurrently with the reconciler's rounds: each in a thread of its own.

The finalisation of an attempt (``begin``) has a lease, which is renewed for as long as it takes, even while a round is blocked:
no other reconciler takes the job over in the middle. Housekeeping (``aside``) belongs to no job: one of each kind runs at a time.
Threads end with the process, wherever they are; the next process begins their work again.
"""

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
    """Start ``work`` in a thread, which has the caller's logging context."""
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name=name, daemon=True).start()


def in_caller(_name: str, work: Callable[[], None]) -> None:
    """Run ``work`` in the caller's thread, for simulations: its effect is then a function of the seed."""
    work()


class Background:
    """``wake``: called when an attempt has been finalised."""

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
        """The jobs whose attempt is being finalised, and since when; seconds, monotonic."""
        with self._changed:
            return {job_id: began for job_id, (_, began) in self._finishing.items()}

    def start_finishing(self, lease: Lease, work: Callable[[], T]) -> Future[T] | None:
        """Finalise an attempt in the background. Return None if the maximum number is running already: call again. Raises
        ``RuntimeError`` if no thread can be started."""
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
        """Start the renewal of the leases of attempts that are being finalised. Call it periodically: at times no thread can be
        started."""
        with self._changed:
            if not self._finishing or self._renewing:
                return
            self._renewing = True
        try:
            self._start("leases", self._renew)
        except Exception as error:
            with self._changed:
                self._renewing = False
            log.error("leases of attempts being finalised are renewed by the rounds only: %s", error)

    def _run_finish(self, lease: Lease, work: Callable[[], T], future: Future[T]) -> None:
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
        with self._changed:
            self._finishing.pop(lease.job_id, None)
            self._changed.notify_all()

    def _renew(self) -> None:
        """Renew the leases, the first time well before that of the caller ends, which was certainly held when the work began
        (``leases.SAFE_FRACTION``)."""
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
        """Run ``work``, once more after the run in progress if there is one. Errors are logged: every kind of work is run again
        later."""
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
        """Wait until nothing is running, at most ``seconds``; the leases of running work are renewed meanwhile, and
        afterwards."""
        with self._changed:
            self._changed.wait_for(lambda: not self._finishing and not self._housekeeping, seconds)
