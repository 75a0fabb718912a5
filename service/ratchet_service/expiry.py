"""Housekeeping by time: jobs past their ``ttl``, deletions that a crash cut short, code snapshots that no job names."""

from __future__ import annotations

import logging
from typing import Final

import sqlalchemy as sa

from ratchet_contract.errors import Conflict, NotFound
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import JobPhase
from ratchet_service import disk, snapshot
from ratchet_service.database import Database
from ratchet_service.models import Job
from ratchet_service.usecases.deletion import delete, sweep_deleted

log = logging.getLogger(__name__)

INTERVAL: Final = 5.0
_TERMINAL: Final = tuple(p for p in JobPhase if p.terminal)


class Expiry:
    """``run`` every ``interval`` seconds; several may run side by side."""

    interval = INTERVAL

    def __init__(self, database: Database, home: HomePaths, grace: float = snapshot.GRACE) -> None:
        self._database = database
        self._home = home
        self._grace = grace
        self._swept = False

    def run(self) -> None:
        """One round. A job that cannot be deleted now is tried again in the next."""
        if not self._swept:
            for job_id in sweep_deleted(self._database, self._home):
                log.info("%s: its deletion was finished", job_id)
            self._swept = True
        for job_id in self._due():
            try:
                result = delete(self._database, job_id, keep_checkpoints=False, if_match=None, homes=self._home)
            except (NotFound, Conflict) as error:
                log.info("%s: not deleted at its ttl: %s", job_id, error.detail)
            except OSError as error:  # of its files; the others must go all the same
                log.error("%s: not deleted at its ttl: %s", job_id, error)
            else:
                log.info("%s: deleted at its ttl", job_id)
                if result.remote is not None:
                    log.warning("%s: %s", job_id, result.remote)
        disk.reserve(self._database)  # again, once there is room after a deletion took it
        for digest in snapshot.remove_unreferenced(self._home.code, self._referenced, self._grace):
            log.info("code snapshot %s removed: no job names it", digest)

    def _due(self) -> list[str]:
        query = sa.select(Job.id, Job.ended_at, Job.ttl)
        query = query.where(Job.ttl.is_not(None), Job.phase.in_(_TERMINAL), Job.ended_at.is_not(None))
        now = self._database.clock.now()
        with self._database.read() as session:
            rows = session.execute(query).all()
        return [i for i, ended, ttl in rows if ended and ttl is not None and (now - ended).total_seconds() >= ttl]

    def _referenced(self) -> set[str]:
        with self._database.read() as session:
            keys = [Job.resolved[key].as_string() for key in ("code_digest", "start_digest")]
            return {digest for row in session.execute(sa.select(*keys)) for digest in row if digest}
