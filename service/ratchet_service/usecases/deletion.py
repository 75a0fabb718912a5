"""Deleting a job that has ended: its rows at once, its files right after; a crash between the two is made good at start."""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from pathlib import Path
from typing import Final

from sqlalchemy.exc import DBAPIError

from ratchet_contract.api import DeleteResult
from ratchet_contract.errors import Conflict, RatchetError
from ratchet_contract.paths import HomePaths, JobPaths, is_job_id
from ratchet_contract.phases import Event
from ratchet_service import disk, object_store
from ratchet_service.database import Database
from ratchet_service.file_owner import as_owner, open_read
from ratchet_service.models import Job
from ratchet_service.transitions import check
from ratchet_service.usecases.jobs import require_match
from ratchet_service.usecases.queries import hold_job, waiting_forks
from ratchet_store.files import fsync_dir, remove_tree
from ratchet_store.retain import delete_all

log = logging.getLogger(__name__)

MARK: Final = "DELETING"
_KEEP: Final = "keep-checkpoints"
_MOST_TOLD: Final = 64 << 10  # bytes of a mark


def delete(
    database: Database, job_id: str, keep_checkpoints: bool, if_match: str | None, homes: HomePaths
) -> DeleteResult:
    """Remove the job, its history and its files. Raises ``NotFound``; ``Conflict`` while it has not ended, or while a fork
    that has not started yet needs its checkpoints (``checkpoint-in-use``).

    Deleting is what makes room on a full disk, and needs some itself: what was kept for it.
    """
    try:
        result = _delete(database, job_id, keep_checkpoints, if_match, homes)
    except (DBAPIError, OSError) as error:
        if not disk.is_full(error, homes.home) or not disk.release(database):
            raise
        result = _delete(database, job_id, keep_checkpoints, if_match, homes)
    disk.reserve(database)
    return result


def _delete(
    database: Database, job_id: str, keep_checkpoints: bool, if_match: str | None, homes: HomePaths
) -> DeleteResult:
    paths = homes.job(job_id)
    with database.write() as session:
        job = hold_job(session, job_id)
        check(job, Event.DELETE)
        require_match(job, if_match)
        forks = [] if keep_checkpoints else waiting_forks(session, job_id)
        if forks:
            raise Conflict(
                f"job {forks[0]} was forked from this one and has no checkpoint of its own yet: keep the checkpoints, "
                "or delete the fork first",
                code="checkpoint-in-use",
            )
        uri = job.spec["checkpoint"].get("uri")
        _mark(paths, keep_checkpoints, uri)  # on the disk before the rows go: see sweep_deleted
        session.delete(job)
    left = _remove_files(paths)
    kept = keep_checkpoints and paths.checkpoints.is_dir()
    return DeleteResult(id=job_id, checkpoints=str(paths.checkpoints) if kept else None, remote=left)


def sweep_deleted(database: Database, homes: HomePaths) -> list[str]:
    """Finish deletions that a crash interrupted; returns the jobs' ids. A mark whose job still has its
    row means nothing: its deletion has not been committed, or never was."""
    done = []
    for mark in sorted(homes.jobs.glob(f"*/{MARK}")):
        job_id = mark.parent.name
        if not is_job_id(job_id):
            continue
        with database.read() as session:
            there = session.get(Job, job_id) is not None
        if not there:
            try:
                left = _remove_files(homes.job(job_id))
            except (OSError, RatchetError) as error:  # the others must go all the same
                log.error("%s: its deletion could not be finished: %s", job_id, error)
                continue
            if left is not None:
                log.warning("%s: %s", job_id, left)
            done.append(job_id)
    return done


def _mark(paths: JobPaths, keep_checkpoints: bool, uri: str | None) -> None:
    """It says what stays, or the uri below which copies are to be deleted."""
    if uri is not None and not keep_checkpoints:
        paths.root.mkdir(parents=True, exist_ok=True)
    if not paths.root.is_dir():
        return
    with as_owner(paths.root):
        fd, temporary = tempfile.mkstemp(dir=paths.root, prefix=".deleting-")
        with os.fdopen(fd, "w") as handle:
            handle.write(_KEEP if keep_checkpoints else uri or "")
            handle.flush()
            os.fsync(handle.fileno())
        Path(temporary).rename(paths.root / MARK)  # whatever user code has put there: a link, a FIFO
        fsync_dir(paths.root)


def _remove_files(paths: JobPaths) -> str | None:
    """What is left in the object store, in a sentence; the mark stays with it, so that the next start tries again."""
    with as_owner(paths.root):
        left, empty = _remove_what_goes(paths)
    if empty:
        paths.root.rmdir()
    return left


def _remove_what_goes(paths: JobPaths) -> tuple[str | None, bool]:
    """As ``_remove_files``, and whether the job's directory is to go, too."""
    mark = paths.root / MARK
    try:
        handle = open_read(mark)
    except FileNotFoundError:  # there were no files, or somebody else has removed them
        return None, False
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the sweep and the request may both be at it
        if not mark.exists():
            return None, False
        told = handle.read(_MOST_TOLD).decode()
        keep = told == _KEEP
        if not keep:
            delete_all(paths)
        for path in sorted(paths.root.iterdir()):
            if path == mark or (keep and path == paths.checkpoints):
                continue
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink()
        left = object_store.remove(told, paths.root.name) if told and not keep else None
        if left is not None:
            return left, False
        mark.unlink()
        return None, not any(paths.root.iterdir())
