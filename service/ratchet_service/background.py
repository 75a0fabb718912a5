"""Work that takes as long as a disk does, beside the reconciler's rounds: each in a thread of its own.

The end of an attempt (``begin``) has a lease, which is renewed for as long as it takes, also while a round stands still: no other
reconciler takes the job over in the middle. Housekeeping (``aside``) is of no job: of each kind one runs at a time. Threads end
with the process, wherever they are; whoever finds what they leave begins again.
"""

from __future__ import annotations

import contextvars
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from ratchet_service import leases
from ratchet_service.database import Database, first_line
from ratchet_service.leases import Lease

log = logging.getLogger(__name__)
T = TypeVar("T")
Start = Callable[[str, Callable[[], None]], None]

MOST: Final = 4
"""Ends of attempts at one time: they read and delete files, of few disks mostly."""


def in_thread(name: str, work: Callable[[], None]) -> None:
    """What the log says of whom it is about goes with it."""
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name=name, daemon=True).start()


def at_once(_name: str, work: Callable[[], None]) -> None:
    """In the caller's thread, for who plays a schedule: what it does is a function of the seed then."""
    work()


class Background:
    """``wake``: called when the end of an attempt is through."""

    def __init__(
        self, database: Database, lease_seconds: float, wake: Callable[[], None], start: Start = in_thread
    ) -> None:
        self._database = database
        self._lease_seconds = lease_seconds
        self._wake = wake
        self._start = start
        self._changed = threading.Condition()
        self._held: dict[str, tuple[Lease, float]] = {}  # and when the end began
        self._renewing = False
        self._asked: dict[str, bool] = {}  # kinds of housekeeping that run, and whether they are to run again

    @property
    def jobs(self) -> dict[str, float]:
        """Whose attempt is being ended, and since when; seconds, monotonic."""
        with self._changed:
            return {job_id: began for job_id, (_, began) in self._held.items()}

    def begin(self, lease: Lease, work: Callable[[], T]) -> Future[T] | None:
        """None: as many as may be are under way; ask again. Raises ``RuntimeError`` where no thread can be started."""
        with self._changed:
            if len(self._held) >= MOST:
                return None
            self._held[lease.job_id] = lease, self._database.clock.monotonic()
        found: Future[T] = Future()
        try:
            self._start(f"end of {lease.job_id}", partial(self._end, lease, work, found))
        except Exception:
            self._over(lease)
            raise
        self.keep_leases()
        return found

    def keep_leases(self) -> None:
        """Have the leases of ends renewed. To be called again now and then: at times no thread can be started."""
        with self._changed:
            if not self._held or self._renewing:
                return
            self._renewing = True
        try:
            self._start("leases", self._renew)
        except Exception as error:
            with self._changed:
                self._renewing = False
            log.error("leases of attempts that end are renewed by the rounds alone: %s", error)

    def _end(self, lease: Lease, work: Callable[[], T], found: Future[T]) -> None:
        try:
            value = work()
        except Exception as error:
            self._over(lease)
            found.set_exception(error)
        else:
            self._over(lease)
            found.set_result(value)
        self._wake()

    def _over(self, lease: Lease) -> None:
        with self._changed:
            self._held.pop(lease.job_id, None)
            self._changed.notify_all()

    def _renew(self) -> None:
        """First well before the lease of whoever began ends: it was surely held then (``leases.TRUSTED``)."""
        pause = self._lease_seconds * (1 - leases.TRUSTED) / 2
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._held, pause):
                    self._renewing = False
                    return
                held = [lease for lease, _ in self._held.values()]
            try:
                with self._database.write() as session:
                    leases.renew(session, held, self._lease_seconds)
            except SQLAlchemyError as error:
                log.warning("leases of attempts that end were not renewed: %s", first_line(error))
            except Exception:
                log.exception("leases of attempts that end were not renewed")

    def aside(self, kind: str, work: Callable[[], None]) -> None:
        """Once more behind the one that runs, if one does. Errors are logged: whatever it is, it comes again."""
        with self._changed:
            runs = kind in self._asked
            self._asked[kind] = True
        if runs:
            return
        try:
            self._start(kind, partial(self._beside, kind, work))
        except Exception as error:
            log.error("%s was not begun: %s", kind, error)
            with self._changed:
                self._asked.pop(kind, None)
                self._changed.notify_all()

    def _beside(self, kind: str, work: Callable[[], None]) -> None:
        while True:
            with self._changed:
                if not self._asked[kind]:
                    del self._asked[kind]
                    self._changed.notify_all()
                    return
                self._asked[kind] = False
            try:
                work()
            except SQLAlchemyError as error:
                log.error("%s: the database does not answer: %s", kind, first_line(error))
            except Exception:
                log.exception("%s failed", kind)

    def wait(self, seconds: float) -> None:
        """Until nothing is under way, for so long at the most; the leases of what is are renewed meanwhile, and behind it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held and not self._asked, seconds)
