"""Deletion of checkpoints: a row is marked first, in a transaction; the files are deleted after it. A marked checkpoint is not
used any more, so what a crash leaves can be deleted later."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.errors import CheckpointError, NotFound
from ratchet_contract.paths import MANIFEST_NAME, HomePaths, JobPaths, checkpoint_dir_name
from ratchet_contract.phases import EventType
from ratchet_service.db.clock import now_in
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Checkpoint
from ratchet_service.db.transitions import add_event, lock_job
from ratchet_service.isolation.file_access import as_owner
from ratchet_store.retention.delete import delete_unless_pinned
from ratchet_store.retention.rules import Id

log = logging.getLogger(__name__)


def mark_deleted(session: Session, rows: Iterable[Checkpoint]) -> None:
    """Mark these checkpoints as deleted; ``delete_marked`` deletes their files later. The caller has locked their job's row."""
    now = now_in(session)
    for row in rows:
        row.state, row.removing_since = "deleted", now


def delete_marked(database: Database, paths: JobPaths, job_id: str) -> set[str]:
    """Delete the files of the job's marked checkpoints, and return the deleted names. Not in a transaction. A checkpoint that
    still has its manifest becomes committed again."""
    marked = sa.select(Checkpoint.step, Checkpoint.attempt).where(
        Checkpoint.job_id == job_id, Checkpoint.removing_since.is_not(None)
    )
    with database.read() as session:
        ids = [
            (step, attempt) for step, attempt in session.execute(marked.order_by(Checkpoint.step, Checkpoint.attempt))
        ]
    done = {one: _delete(paths, paths.checkpoint(*one)) for one in ids}
    if done:
        try:
            _record(database, job_id, done)
        except NotFound:
            log.info("%s: deleted while files of it were", job_id)
    return {checkpoint_dir_name(*one) for one, (stays, said) in done.items() if not stays and said is None}


def _delete(paths: JobPaths, directory: Path) -> tuple[bool, str | None]:
    """Delete the checkpoint's directory, unless it is pinned. Return whether its manifest exists, and the text of a refusal."""
    refusal = None
    with as_owner(paths.root):
        try:
            delete_unless_pinned(directory)
        except CheckpointError as error:
            refusal = error.detail
        return (directory / MANIFEST_NAME).exists(), refusal


def _record(database: Database, job_id: str, done: Mapping[Id, tuple[bool, str | None]]) -> None:
    """Store the results of ``_delete``, by step and attempt, in the rows. Raises ``NotFound`` if the job was deleted
    meanwhile."""
    with database.write() as session:
        lock_job(session, job_id)
        for (step, attempt), (stays, said) in done.items():
            row = session.get(Checkpoint, (job_id, step, attempt))
            if row is None or row.removing_since is None:
                continue  # another process was faster
            row.removing_since = None
            if stays and row.state == "deleted":
                row.state = "committed"
            if said is not None:
                add_event(session, job_id, EventType.CHECKPOINT_NOT_DELETED, said, attempt=attempt)


def delete_all_marked(database: Database, homes: HomePaths) -> None:
    """Delete the files of the marked checkpoints of all jobs. An error with one job is only logged."""
    with database.read() as session:
        jobs = session.scalars(
            sa.select(Checkpoint.job_id).where(Checkpoint.removing_since.is_not(None)).distinct()
        ).all()
    for job_id in jobs:
        try:
            gone = delete_marked(database, homes.job(job_id), job_id)
        except Exception:  # it must not delay the jobs after it
            log.exception("%s: checkpoints that go were not deleted", job_id)
        else:
            log.info("%s: %s deleted", job_id, ", ".join(sorted(gone)) or "no checkpoint")
