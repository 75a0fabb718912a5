"""Housekeeping by time: deletes jobs past their ``ttl`` and unused code snapshots, and finishes interrupted deletions. A ttl
goes by the database's clock; a job stays for some minutes after it, since that clock may be wrong."""

from __future__ import annotations

import logging
import time
from typing import Final

import sqlalchemy as sa

from ratchet_contract.errors import CheckpointError, Conflict, NotFound
from ratchet_contract.paths import HomePaths
from ratchet_service.checkpoints import removal
from ratchet_service.db import leases
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, Job
from ratchet_service.job_files.delete_job import delete, sweep_deleted
from ratchet_service.observability import disk_space
from ratchet_service.user_code import snapshot

log = logging.getLogger(__name__)

INTERVAL: Final = 5.0
CONFIRM_SECONDS: Final = 600.0
"""Seconds for which one process must see a job past its ttl before it deletes it; the ttl itself, if that is shorter. A wrong
clock may be corrected by then."""
_CODE_INTERVAL: Final = 3600.0
"""Which snapshots jobs name is read from every job's row: not more often than this, after the first round."""
_REMOVALS_INTERVAL: Final = 600.0
"""Interval in seconds at which this housekeeping continues removals, which another process may have begun and still be working
on."""


class Expiry:
    """Deletes jobs past their ttl and code snapshots unused for ``grace`` seconds, and finishes interrupted deletions."""

    interval = INTERVAL

    def __init__(self, database: Database, home: HomePaths, grace: float = snapshot.GRACE) -> None:
        self._database = database
        self._home = home
        self._grace = grace
        self._swept = False
        self._code_swept_at: float | None = None
        self._removals_resumed_at: float | None = None
        self._expired_since: dict[str, float] = {}  # job id -> monotonic time at which it was first seen past its ttl

    def run(self) -> None:
        """Run one round of the housekeeping that is due. Jobs that cannot be deleted now are logged."""
        if not self._swept:
            for job_id in sweep_deleted(self._database, self._home):
                log.info("%s: its deletion was finished", job_id)
            self._swept = True
        read_at = time.monotonic()
        if self._removals_resumed_at is None or read_at - self._removals_resumed_at >= _REMOVALS_INTERVAL:
            self._removals_resumed_at = read_at
            removal.delete_all_marked(self._database, self._home)
        for job_id in self._jobs_to_delete():
            try:
                result = delete(self._database, job_id, outputs=None, homes=self._home)
            except (NotFound, Conflict) as error:
                log.info("%s: not deleted at its ttl: %s", job_id, error.detail)
            except (OSError, CheckpointError) as error:  # of its files; the other jobs must be deleted all the same
                log.error("%s: not deleted at its ttl: %s", job_id, error)
            else:
                log.info("%s: deleted at its ttl", job_id)
                if result.outputs is not None:
                    log.info("%s: the files of its working directory stay in %s", job_id, result.outputs)
                if result.remote is not None:
                    log.warning("%s: %s", job_id, result.remote)
        disk_space.reserve_space(self._database)  # again, once there is free space after a deletion has used it
        read_at = time.monotonic()
        if self._code_swept_at is None or read_at - self._code_swept_at >= _CODE_INTERVAL:
            self._code_swept_at = read_at
            for digest in snapshot.remove_unreferenced(self._home.code, self._referenced_snapshots, self._grace):
                log.info("code snapshot %s removed: no job and no attempt uses it", digest)

    def _jobs_to_delete(self) -> list[str]:
        """Return the ids of jobs that ended at least their ``ttl`` ago by the database's clock, and that this process has seen so
        for the shorter of the ttl and ``CONFIRM_SECONDS``."""
        # Only by the index of jobs with a ttl: a condition on the phase would read every job that ever ended.
        query = sa.select(Job.id, Job.ended_at, Job.ttl).where(Job.ttl.is_not(None))
        with self._database.read() as session:
            now, rows = leases.database_now(session), session.execute(query).all()
        read_at = self._database.clock.monotonic()
        expired = {
            i: ttl for i, ended, ttl in rows if ended and ttl is not None and (now - ended).total_seconds() >= ttl
        }
        self._expired_since = {job_id: self._expired_since.get(job_id, read_at) for job_id in expired}
        return [i for i, ttl in expired.items() if read_at - self._expired_since[i] >= min(ttl, CONFIRM_SECONDS)]

    def _referenced_snapshots(self) -> set[str]:
        """Return the digests of the code snapshots and ``start_from`` files that jobs name, and of the code that attempts ran."""
        # a job's first checkpoints may come from the code that it had before a resume
        ran = Attempt.launch["launch_file", "resolved", "code_digest"].as_string()
        with self._database.read() as session:
            keys = [Job.resolved[key].as_string() for key in ("code_digest", "start_digest")]
            rows = [*session.execute(sa.select(*keys)), *session.execute(sa.select(ran).distinct())]
            return {digest for row in rows for digest in row if digest}
