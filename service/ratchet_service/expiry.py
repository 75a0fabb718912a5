"""Housekeeping by time: jobs past their ``ttl``, deletions that a crash cut short (of jobs, of checkpoints), code snapshots that
no job names and no attempt of one ran.

A ttl goes by the database's clock, which all services share. Behind a jump of that clock nothing is deleted for a while, by
nobody (``jumps``): not by a process that starts then, nor where the machine was started anew and its clock shows a time long
after, or before, the newest thing recorded. A job's end has the time of the machine that wrote it: where that clock was set back
when the job ended, it is deleted by so much too early.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime
from typing import Final

import sqlalchemy as sa

from ratchet_contract.errors import CheckpointError, Conflict, NotFound
from ratchet_contract.paths import HomePaths
from ratchet_service import disk, jumps, leases, removal, snapshot
from ratchet_service.database import Database
from ratchet_service.models import Attempt, Job
from ratchet_service.usecases.deletion import delete, sweep_deleted

log = logging.getLogger(__name__)

INTERVAL: Final = 5.0
RESTS: Final = 600.0
"""Seconds behind a jump in which nothing is deleted: a clock that was set wrong may be set right by then."""
_CODE_INTERVAL: Final = 3600.0
"""Which snapshots jobs name is read out of every job's row: not more often than this, after the first look."""
_REMOVALS_INTERVAL: Final = 600.0
"""Removals that another process has begun, and may still be at, are taken up after the first look not more often than this."""


class Expiry:
    """``run`` every ``interval`` seconds; several may run side by side."""

    interval = INTERVAL

    def __init__(self, database: Database, home: HomePaths, grace: float = snapshot.GRACE) -> None:
        self._database = database
        self._home = home
        self._grace = grace
        self._swept = False
        self._code_seen: float | None = None
        self._removals_seen: float | None = None
        self._jumps = jumps.Jumps(database.clock, jumps.DATABASE, self._clock)

    def run(self) -> None:
        """One round. A job that cannot be deleted now is tried again in the next."""
        if not self._swept:
            for job_id in sweep_deleted(self._database, self._home):
                log.info("%s: its deletion was finished", job_id)
            self._swept = True
        read_at = time.monotonic()
        if self._removals_seen is None or read_at - self._removals_seen >= _REMOVALS_INTERVAL:
            self._removals_seen = read_at
            removal.carry_on(self._database, self._home)
        now = self._clock()
        trusted = self._trusted()  # behind the reading: a jump before it is seen
        for job_id in self._due(now) if trusted else ():
            try:
                result = delete(self._database, job_id, outputs=None, homes=self._home)
            except (NotFound, Conflict) as error:
                log.info("%s: not deleted at its ttl: %s", job_id, error.detail)
            except (OSError, CheckpointError) as error:  # of its files; the others must go all the same
                log.error("%s: not deleted at its ttl: %s", job_id, error)
            else:
                log.info("%s: deleted at its ttl", job_id)
                if result.outputs is not None:
                    log.info("%s: what it left in its working directory stays in %s", job_id, result.outputs)
                if result.remote is not None:
                    log.warning("%s: %s", job_id, result.remote)
        disk.reserve(self._database)  # again, once there is room after a deletion took it
        read_at = time.monotonic()
        if trusted and (self._code_seen is None or read_at - self._code_seen >= _CODE_INTERVAL):
            self._code_seen = read_at
            for digest in snapshot.remove_unreferenced(self._home.code, self._referenced, self._grace):
                log.info("code snapshot %s removed: no job names it, and none of its attempts ran it", digest)

    def _clock(self) -> datetime:
        with self._database.read() as session:
            return leases.database_now(session)

    def _trusted(self) -> bool:
        """May something be deleted by the database's clock now?"""
        seconds = self._jumps.look()
        if seconds is None:
            with self._database.read() as session:
                if self._jumps.learn(session):
                    return not self._jumps.rests
        if seconds != 0.0:
            with self._database.write() as session:

                def rests(unknown: bool) -> float:
                    return 0.0 if unknown and jumps.plausible(session, leases.database_now(session)) else RESTS

                seen = self._jumps.settle(session, rests)
            self._jumps.settled(seen)
            if seen.fresh != 0.0:
                log.warning("the database's clock jumped by %+.0f s: nothing is deleted for %g s", seen.fresh, RESTS)
            elif self._jumps.rests:
                log.info("nobody can tell whether the clock is right: nothing is deleted for %g s", RESTS)
        return not self._jumps.rests

    def _due(self, now: datetime) -> list[str]:
        # By the index of those that have a ttl, and nothing else: of the phases every ended job there ever was would be read.
        query = sa.select(Job.id, Job.ended_at, Job.ttl).where(Job.ttl.is_not(None))
        with self._database.read() as session:
            rows = session.execute(query).all()
        return [i for i, ended, ttl in rows if ended and ttl is not None and (now - ended).total_seconds() >= ttl]

    def _referenced(self) -> set[str]:
        """Snapshots that a job names, or that an attempt of it ran: the code of before a resume made its first checkpoints."""
        ran = Attempt.launch["launch_file", "resolved", "code_digest"].as_string()
        with self._database.read() as session:
            keys = [Job.resolved[key].as_string() for key in ("code_digest", "start_digest")]
            rows = [*session.execute(sa.select(*keys)), *session.execute(sa.select(ran).distinct())]
            return {digest for row in rows for digest in row if digest}
