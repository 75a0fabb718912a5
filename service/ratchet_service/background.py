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
        self._held: dict[str, Lease] = {}
        self._renewing = False
        self._asked: dict[str, bool] = {}  # kinds of housekeeping that run, and whether they are to run again

    @property
    def jobs(self) -> set[str]:
        """Whose attempt is being ended."""
        with self._changed:
            return set(self._held)

    def begin(self, lease: Lease, work: Callable[[], T]) -> Future[T] | None:
        """None: as many as may be are under way; ask again."""
        with self._changed:
            if len(self._held) >= MOST:
                return None
            self._held[lease.job_id] = lease
        found: Future[T] = Future()
        self._start(f"end of {lease.job_id}", partial(self._end, lease, work, found))
        with self._changed:
            renew = bool(self._held) and not self._renewing
            self._renewing = self._renewing or renew
        if renew:
            self._start("leases", self._renew)
        return found

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
            del self._held[lease.job_id]
            self._changed.notify_all()

    def _renew(self) -> None:
        """First well before the lease of whoever began ends: it was surely held then (``leases.TRUSTED``)."""
        pause = self._lease_seconds * (1 - leases.TRUSTED) / 2
        while True:
            with self._changed:
                if self._changed.wait_for(lambda: not self._held, pause):
                    self._renewing = False
                    return
                held = list(self._held.values())
            try:
                with self._database.write() as session:
                    leases.renew(session, held, self._lease_seconds)
            except SQLAlchemyError as error:
                log.warning("leases of attempts that end were not renewed: %s", first_line(error))

    def aside(self, kind: str, work: Callable[[], None]) -> None:
        """Once more behind the one that runs, if one does. Errors are logged: whatever it is, it comes again."""
        with self._changed:
            runs = kind in self._asked
            self._asked[kind] = True
        if not runs:
            self._start(kind, partial(self._beside, kind, work))

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
