"""Deletes a job that has ended: its rows at once, its files right after. A marker file on the disk says what to delete; if a
crash comes between the two, a reconciler deletes the files later (``sweep_deleted``)."""

from __future__ import annotations

import fcntl
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TypeVar

from pydantic import BaseModel
from sqlalchemy.exc import DBAPIError

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.roles import LOCAL_OWNER
from ratchet_contract.api.views import DeleteResult
from ratchet_contract.atomic_write import write_atomic
from ratchet_contract.code.tree import DIGEST
from ratchet_contract.errors import Conflict, NotFound, RatchetError
from ratchet_contract.paths import HomePaths, JobPaths, is_job_id
from ratchet_contract.phases import Event
from ratchet_service.checkpoints import object_store
from ratchet_service.db import audit
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Job
from ratchet_service.db.principal import Principal
from ratchet_service.db.queries import find_job_for_update, require_match, waiting_forks
from ratchet_service.db.transitions import check_transition
from ratchet_service.isolation.file_access import as_owner, open_read
from ratchet_service.job_files import kept_outputs
from ratchet_service.launchers.attempt_files import lock_is_held
from ratchet_service.observability import disk_space
from ratchet_store.filesystem.durable_io import remove_tree
from ratchet_store.retention.delete import delete_all

log = logging.getLogger(__name__)
T = TypeVar("T")

MARKER_NAME: Final = "DELETING"
_MAX_MARKER_BYTES: Final = 64 << 10  # bytes of a marker file


class _Mark(BaseModel):
    """Content of the marker file: what to delete. ``outputs``: the working directory is deleted, too. ``uri``: prefix of the
    checkpoints' copies in the object store. ``code``: digest of the code's snapshot."""

    keep_checkpoints: bool = False
    outputs: bool = False
    uri: str | None = None
    code: str | None = None
    owner: str = LOCAL_OWNER


def delete(
    database: Database,
    job_id: str,
    *,
    keep_checkpoints: bool = False,
    outputs: bool | None = False,
    if_match: str | None = None,
    homes: HomePaths,
    caller: Principal | None = None,
) -> DeleteResult:
    """Delete the job's row, history and logs, and its checkpoints unless ``keep_checkpoints``. Return what stays of the job.
    ``outputs``: True also deletes the files that the job made in its working directory; None decides by the job's
    ``ttl_outputs``.

    If an earlier deletion has kept the working directory, ``outputs`` True deletes it now. For this, ``caller`` must be the job's
    owner or an admin. ``caller`` None: the service itself deletes the job. ``if_match``: the header If-Match. Raises
    ``NotFound``, ``Refused``, ``Conflict`` (such as while the job has not ended), ``CheckpointError`` and ``OSError``. If the row
    is already deleted when an error occurs, a reconciler deletes the rest later.
    """
    try:
        _with_reserve(
            database, homes, lambda: _delete_row(database, job_id, keep_checkpoints, outputs, if_match, homes, caller)
        )
    except NotFound:
        if not outputs or caller is None:
            raise
        kept = _with_reserve(database, homes, lambda: kept_outputs.remove(database, homes, job_id, caller))
        if kept is None:
            raise
        return kept
    left = _with_reserve(database, homes, lambda: _remove_files(homes, job_id))
    disk_space.reserve_space(database)
    paths = homes.job(job_id)
    return DeleteResult(
        id=job_id,
        checkpoints=str(paths.checkpoints) if keep_checkpoints and paths.checkpoints.is_dir() else None,
        outputs=None if kept_outputs.read_owner(paths) is None else str(paths.work_dir),
        remote=left,
    )


def _with_reserve(database: Database, homes: HomePaths, step: Callable[[], T]) -> T:
    """Return the result of ``step``. If the disk is full, and reserved space can be released, call it again."""
    try:
        return step()
    except (DBAPIError, OSError) as error:
        if not disk_space.is_disk_full_error(error, homes.home) or not disk_space.release_space(database):
            raise
        return step()


def _delete_row(
    database: Database,
    job_id: str,
    keep_checkpoints: bool,
    outputs: bool | None,
    if_match: str | None,
    homes: HomePaths,
    caller: Principal | None,
) -> None:
    """Delete the job's row, and before that write the marker file for ``_remove_files``. Parameters and errors are those of
    ``delete``."""
    paths = homes.job(job_id)
    with database.write(caller) as session:
        job = find_job_for_update(session, job_id)
        check_transition(job, Event.DELETE)
        require_match(job, if_match)
        forks = [] if keep_checkpoints else waiting_forks(session, job_id)
        if forks:
            raise Conflict(
                f"job {forks[0]} was forked from this one and has no checkpoint of its own yet: keep the checkpoints, "
                "or delete the fork first",
                code="checkpoint-in-use",
            )
        uri = job.spec["checkpoint"].get("uri")
        remove_outputs = bool(job.spec.get("ttl_outputs")) if outputs is None else outputs
        mark = _Mark(
            keep_checkpoints=keep_checkpoints,
            outputs=remove_outputs,
            uri=uri,
            code=job.resolved.get("code_digest"),
            owner=job.owner,
        )
        _write_marker(paths, mark)  # on the disk before the rows go: see sweep_deleted
        data = {
            "name": job.name,
            "phase": job.phase.value,
            "keep_checkpoints": keep_checkpoints,
            "outputs": remove_outputs,
        }
        audit.record(session, AuditAction.DELETE, "job", job_id, job.owner, data)
        session.delete(job)


@contextmanager
def deleted_unless_stored(paths: JobPaths) -> Iterator[None]:
    """Context manager: create the directory of a job; the block then commits the job's row. The directory is deleted if the block
    raises ``RatchetError`` or ``OSError``. After another error or a SIGKILL, ``sweep_deleted`` deletes it unless the row
    exists."""
    paths.root.mkdir(mode=0o700, parents=True)
    marker = paths.root / MARKER_NAME
    unlocked = marker.with_suffix(".new")
    with unlocked.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the sweep leaves it while this process lives
        try:
            handle.write(_Mark().model_dump_json())
            handle.flush()
            unlocked.rename(marker)  # the sweep never sees it without the lock
            yield
        except (RatchetError, OSError):  # an error of the database may have come after the commit
            remove_tree(paths.root)
            raise
        marker.unlink(missing_ok=True)


def sweep_deleted(database: Database, homes: HomePaths) -> list[str]:
    """Finish interrupted deletions, delete the files of interrupted submissions, and return the ids of the jobs concerned. A job
    whose files cannot be deleted is only logged."""
    done = []
    for mark in sorted(homes.jobs.glob(f"*/{MARKER_NAME}")):
        job_id = mark.parent.name
        if not is_job_id(job_id):
            continue
        try:
            if lock_is_held(mark):
                continue
            with database.read() as session:  # after the lock: a submission commits its row while it holds it
                if session.get(Job, job_id) is not None:
                    continue
            left = _remove_files(homes, job_id)
        except (OSError, ValueError, RatchetError) as error:  # the others must be deleted all the same
            log.error("%s: its deletion could not be finished: %s", job_id, error)
            continue
        if left is not None:
            log.warning("%s: %s", job_id, left)
        done.append(job_id)
    return done


def _write_marker(paths: JobPaths, mark: _Mark) -> None:
    """Write the marker file durably. If the job has no directory, the directory is created only if copies in an object store are
    to be deleted; otherwise nothing is written."""
    if mark.uri is not None and not mark.keep_checkpoints:
        paths.root.mkdir(parents=True, exist_ok=True)
    if not paths.root.is_dir():
        return
    with as_owner(paths.root):
        write_atomic(paths.root / MARKER_NAME, mark.model_dump_json().encode(), durable=True, mode=0o600)


def _remove_files(homes: HomePaths, job_id: str) -> str | None:
    """Delete the job's files, and its copies in an object store, as its marker file says. Return a sentence if copies could not
    be deleted, otherwise None."""
    paths = homes.job(job_id)
    with as_owner(paths.root):
        left, empty = _remove_unkept_files(paths, homes)
    if empty:
        paths.root.rmdir()
    return left


def _remove_unkept_files(paths: JobPaths, homes: HomePaths) -> tuple[str | None, bool]:
    """Like ``_remove_files``, within ``as_owner``. Return its result, and True if the caller must remove the job's empty
    directory."""
    place = paths.root / MARKER_NAME
    try:
        handle = open_read(place)
    except FileNotFoundError:  # there were no files, or another process has removed them
        return None, False
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the sweep and the request may run concurrently
        if not place.exists():
            return None, False
        mark = _Mark.model_validate_json(
            handle.read(_MAX_MARKER_BYTES) or "{}"
        )  # empty: of a submission that was cut off
        stays = {place}
        if mark.keep_checkpoints:
            stays.add(paths.checkpoints)
        else:
            delete_all(paths)
        code = homes.code / mark.code if mark.code is not None and re.fullmatch(DIGEST, mark.code) else None
        if not mark.outputs and kept_outputs.keep(paths, mark.owner, code):
            stays |= {paths.work_dir, paths.kept_marker}
        for path in sorted(paths.root.iterdir()):
            if path in stays:
                continue
            if path.is_dir() and not path.is_symlink():
                remove_tree(path)
            else:
                path.unlink()
        left = None
        if mark.uri is not None and not mark.keep_checkpoints:
            left = object_store.remove(mark.uri, paths.root.name)
        if left is not None:
            return left, False
        place.unlink()
        return None, not any(paths.root.iterdir())
