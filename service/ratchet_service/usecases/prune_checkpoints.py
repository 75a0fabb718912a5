"""Deletes checkpoints outside a job's lineage, remains of saves, and quarantined checkpoints; only on request."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.requests import PruneRequest
from ratchet_contract.api.views import PruneResult
from ratchet_contract.checkpoint.resume_report import lineage_contains
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, PINNED_NAME, HomePaths, JobPaths, parse_checkpoint_dir_name
from ratchet_contract.phases import EventType
from ratchet_contract.plural import pluralize
from ratchet_service.checkpoints import removal
from ratchet_service.checkpoints.lineage import lineage_of
from ratchet_service.db import audit
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Checkpoint, Job
from ratchet_service.db.principal import Principal
from ratchet_service.db.queries import find_job, find_job_for_update
from ratchet_service.db.transitions import add_event
from ratchet_service.isolation.file_access import as_owner
from ratchet_store.format.manifest_file import checkpoint_dirs
from ratchet_store.retention.delete import delete, delete_unless_pinned
from ratchet_store.retention.rules import Id


class _Found(NamedTuple):
    """The directory of a checkpoint, or what remains of it. ``id``: step and attempt; None: a quarantined directory whose name
    does not have them. ``size``: in bytes. ``committed``: it has a manifest. For quarantined checkpoints, ``pinned`` and
    ``committed`` are not determined."""

    directory: Path
    id: Id | None
    size: int
    pinned: bool = False
    committed: bool = False


def prune(database: Database, job_id: str, request: PruneRequest, homes: HomePaths, caller: Principal) -> PruneResult:
    """Delete checkpoints outside the job's lineage and remains of saves, if their attempts are over and they are not pinned. With
    ``quarantined`` in the request, delete also all quarantined checkpoints, even pinned ones. Return what was deleted, or what
    would be deleted in a ``dry_run``. A failed deletion becomes an event. Do not call this function within a transaction. Raise
    ``NotFound``, or ``CheckpointError`` if the checkpoints cannot be listed."""
    paths = homes.job(job_id)
    with database.read() as session:
        dead = _newest_dead_attempt(
            find_job(session, job_id)
        )  # before the scan: an attempt dead by then writes nothing more
    # the files decide, not the rows: a fenced attempt may have left checkpoints without rows
    found, quarantined = _scan_checkpoints(paths, dead), _scan_quarantine(paths) if request.quarantined else []
    if request.dry_run:
        with database.read() as session:
            return _result(True, _select_deletable(session, find_job(session, job_id), found), quarantined)
    with database.write(caller) as session:
        job = find_job_for_update(session, job_id)
        to_delete = _select_deletable(session, job, found)
        found_rows = (session.get(Checkpoint, (job.id, *one.id)) for one in to_delete if one.id is not None)
        rows = [row for row in found_rows if row is not None]
        removal.mark_deleted(session, [row for row in rows if row.state == "committed"])
        if to_delete or quarantined:  # before the files: no file is deleted without this row
            data = {"checkpoints": len(to_delete), "quarantined": len(quarantined)}
            audit.record(session, AuditAction.PRUNE, "job", job_id, job.owner, data)
        marked = {row.name for row in rows if row.removing_since is not None}
    deleted_names, refused = removal.delete_marked(database, paths, job_id), list[str]()
    unmarked = [one for one in to_delete if one.directory.name not in marked]
    deleted_names |= {one.directory.name for one in unmarked if _delete(one, refused, pinned=False)}
    removed = [one for one in to_delete if one.directory.name in deleted_names]
    emptied = [one for one in quarantined if _delete(one, refused, pinned=True)]
    if removed or emptied or refused:
        with database.write() as session:
            _record_deletions(session, find_job_for_update(session, job_id), removed, emptied, refused)
    return _result(False, removed, emptied)


def _newest_dead_attempt(job: Job) -> int:
    """Return the number of the newest attempt that is certainly over, as are all attempts before it."""
    return job.attempt - 1 if job.phase.active else job.attempt


def _scan_checkpoints(paths: JobPaths, newest_dead: int) -> list[_Found]:
    """Return the checkpoint directories of attempts up to ``newest_dead``, incomplete ones included, oldest first."""
    found = []
    with as_owner(paths.root):
        for step, attempt, directory in checkpoint_dirs(paths.checkpoints):
            if attempt <= newest_dead:
                pinned, committed = (directory / PINNED_NAME).exists(), (directory / MANIFEST_NAME).exists()
                found.append(_Found(directory, (step, attempt), _size(directory), pinned, committed))
    return found[::-1]


def _scan_quarantine(paths: JobPaths) -> list[_Found]:
    """Return the quarantined checkpoints of the job, sorted by name."""
    with as_owner(paths.root):
        found = sorted(paths.quarantine.iterdir()) if paths.quarantine.is_dir() else []
        # the name of a second quarantined copy ends in .1
        return [_Found(at, parse_checkpoint_dir_name(".".join(at.name.split(".")[:2])), _size(at)) for at in found]


def _select_deletable(session: Session, job: Job, candidates: list[_Found]) -> list[_Found]:
    """Return those of ``candidates`` that are to be deleted: not pinned, and not a committed checkpoint of the job's lineage."""
    segments, out = lineage_of(session, job), []
    for one in candidates:
        assert one.id is not None
        row = session.get(Checkpoint, (job.id, *one.id))
        pinned = one.pinned or (row is not None and row.pinned)
        if not pinned and not (one.committed and lineage_contains(segments, *one.id)):
            out.append(one)
    return out


def _delete(one: _Found, refused: list[str], *, pinned: bool) -> bool:
    """Delete the directory of a checkpoint and return True. Return False if it is not completely deleted: it is pinned, or there
    was an error, which is added to ``refused``. ``pinned``: delete it even if it is pinned."""
    with as_owner(one.directory):
        try:
            if not pinned:
                return delete_unless_pinned(one.directory)
            delete(one.directory)
        except CheckpointError as error:
            refused.append(error.detail)
            return False
    return True


def _record_deletions(
    session: Session, job: Job, removed: list[_Found], emptied: list[_Found], refused: list[str]
) -> None:
    """Record the deletions, and each refused one, as events. Mark the rows of ``emptied``, quarantined checkpoints, as
    deleted."""
    for one in emptied:
        row = session.get(Checkpoint, (job.id, *one.id)) if one.id is not None else None
        if row is not None and row.state == "quarantined":
            row.state = "deleted"
    for detail in refused:
        add_event(session, job.id, EventType.CHECKPOINT_NOT_DELETED, detail)
    if removed or emptied:
        result = _result(False, removed, emptied)
        data = {"checkpoints": result.checkpoints, "quarantined": result.quarantined, "size": result.size}
        text = f"removed: {pluralize(len(removed), 'checkpoint')} that no attempt will start from" + (
            f", and {len(emptied)} damaged" if emptied else ""
        )
        add_event(session, job.id, EventType.CHECKPOINTS_PRUNED, text, data=data)


def _result(dry_run: bool, to_delete: list[_Found], quarantined: list[_Found]) -> PruneResult:
    """Return the API's result. ``to_delete``: checkpoints, ``quarantined``: quarantined ones, that were or would be deleted."""
    names, others = [one.directory.name for one in to_delete], [one.directory.name for one in quarantined]
    return PruneResult(
        dry_run=dry_run, checkpoints=names, quarantined=others, size=sum(one.size for one in (*to_delete, *quarantined))
    )


def _size(directory: Path) -> int:
    """Return the bytes of the files and directories below ``directory``; those that vanish meanwhile count 0. Call it within
    ``as_owner``."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total
