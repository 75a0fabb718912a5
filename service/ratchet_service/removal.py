"""Checkpoints whose files go: a row says so first, in a transaction; the files are deleted behind it, and in none.

From the mark on nobody can pin the checkpoint, start from it or read it: its state is ``deleted``. So it does not matter who
deletes the files, nor how many do. What a crash leaves is taken up by the next end of an attempt, the next ``prune``, and
whoever starts or looks around (``carry_on``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.errors import CheckpointError, NotFound
from ratchet_contract.paths import MANIFEST_NAME, HomePaths, JobPaths, checkpoint_dir_name
from ratchet_service.clock import now_in
from ratchet_service.database import Database
from ratchet_service.file_owner import as_owner
from ratchet_service.models import Checkpoint
from ratchet_service.transitions import add_event, lock_job
from ratchet_store.keeping import Id
from ratchet_store.retain import delete_unless_pinned

log = logging.getLogger(__name__)


def mark(session: Session, rows: Iterable[Checkpoint]) -> None:
    """These go once the transaction is committed; their job's row is held."""
    now = now_in(session)
    for row in rows:
        row.state, row.removing_since = "deleted", now


def carry_out(database: Database, paths: JobPaths, job_id: str) -> set[str]:
    """Delete the files of what is marked, the oldest first; the names of what is gone. Call it in no transaction, and with the
    job's row not held.

    What the system refuses, or has the mark ``PINNED`` that no row knows of, is committed again where it is still whole; the
    former is an event."""
    marked = sa.select(Checkpoint.step, Checkpoint.epoch).where(
        Checkpoint.job_id == job_id, Checkpoint.removing_since.is_not(None)
    )
    with database.read() as session:
        ids = [(step, epoch) for step, epoch in session.execute(marked.order_by(Checkpoint.step, Checkpoint.epoch))]
    done = {one: _delete(paths, paths.checkpoint(*one)) for one in ids}
    if done:
        try:
            _record(database, job_id, done)
        except NotFound:
            log.info("%s: deleted while files of it were", job_id)
    return {checkpoint_dir_name(*one) for one, (stays, said) in done.items() if not stays and said is None}


def _delete(paths: JobPaths, directory: Path) -> tuple[bool, str | None]:
    """Is it whole as before? And what the system said."""
    said = None
    with as_owner(paths.root):
        try:
            delete_unless_pinned(directory)
        except CheckpointError as error:
            said = error.detail
        return (directory / MANIFEST_NAME).exists(), said


def _record(database: Database, job_id: str, done: Mapping[Id, tuple[bool, str | None]]) -> None:
    with database.write() as session:
        lock_job(session, job_id)
        for (step, epoch), (stays, said) in done.items():
            row = session.get(Checkpoint, (job_id, step, epoch))
            if row is None or row.removing_since is None:
                continue  # somebody else was faster
            row.removing_since = None
            if stays and row.state == "deleted":
                row.state = "committed"
            if said is not None:
                add_event(session, job_id, "checkpoint-not-deleted", said, epoch=epoch)


def carry_on(database: Database, homes: HomePaths) -> None:
    """Of all jobs: what an attempt's end has just marked, and what a process that ended has left. A job whose files cannot be
    reached is left for the next time."""
    with database.read() as session:
        jobs = session.scalars(
            sa.select(Checkpoint.job_id).where(Checkpoint.removing_since.is_not(None)).distinct()
        ).all()
    for job_id in jobs:
        try:
            gone = carry_out(database, homes.job(job_id), job_id)
        except Exception:  # the jobs behind it are not to wait for it
            log.exception("%s: checkpoints that go were not deleted", job_id)
        else:
            log.info("%s: %s deleted", job_id, ", ".join(sorted(gone)) or "no checkpoint")
