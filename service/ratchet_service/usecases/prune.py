"""Removing what no attempt of a job will start from: asked for by a user, since a branch may be wanted for a fork."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from sqlalchemy.orm import Session

from ratchet_contract.api import PruneResult
from ratchet_contract.api_requests import PruneRequest
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, PINNED_NAME, HomePaths, JobPaths, parse_checkpoint_dir_name
from ratchet_contract.plural import counted
from ratchet_contract.resume import holds
from ratchet_service import removal
from ratchet_service.database import Database
from ratchet_service.file_owner import as_owner
from ratchet_service.models import Checkpoint, Job
from ratchet_service.transitions import add_event
from ratchet_service.usecases.queries import find_job, hold_job, lineage_of
from ratchet_store.commit import checkpoint_dirs
from ratchet_store.keeping import Id
from ratchet_store.retain import delete, delete_unless_pinned


class _Found(NamedTuple):
    """A checkpoint's directory, or what is left of one; ``size`` in bytes."""

    directory: Path
    id: Id | None
    size: int
    pinned: bool = False
    committed: bool = False


def prune(database: Database, job_id: str, request: PruneRequest, homes: HomePaths) -> PruneResult:
    """Delete what the job's lineage does not hold, and what was never committed or not deleted to its end. Call it in no
    transaction: the rows are marked in one, the files go behind it (``removal``), and what is gone is recorded in another.

    Left alone: what is pinned (a fork pins its source), and everything of the present attempt while one may be alive. The files
    decide, not the rows: a zombie's checkpoints have none. What the system refuses is an event, and not among what is told.
    """
    paths = homes.job(job_id)
    with database.read() as session:
        dead = _dead(find_job(session, job_id))  # before the look: what was dead then writes none of what is seen
    found, aside = _on_disk(paths, dead), _set_aside(paths) if request.quarantined else []
    if request.dry_run:
        with database.read() as session:
            return _result(True, _left_behind(session, find_job(session, job_id), found), aside)
    with database.write() as session:
        job = hold_job(session, job_id)
        going = _left_behind(session, job, found)
        found_rows = (session.get(Checkpoint, (job.id, *one.id)) for one in going if one.id is not None)
        rows = [row for row in found_rows if row is not None]
        removal.mark(session, [row for row in rows if row.state == "committed"])
        marked = {row.name for row in rows if row.removing_since is not None}
    gone, refused = removal.carry_out(database, paths, job_id), list[str]()
    unmarked = [one for one in going if one.directory.name not in marked]
    gone |= {one.directory.name for one in unmarked if _deleted(one, refused, pinned=False)}
    removed = [one for one in going if one.directory.name in gone]
    emptied = [one for one in aside if _deleted(one, refused, pinned=True)]
    if removed or emptied or refused:
        with database.write() as session:
            _record(session, hold_job(session, job_id), removed, emptied, refused)
    return _result(False, removed, emptied)


def _dead(job: Job) -> int:
    """Attempts up to this one are over."""
    return job.epoch - 1 if job.phase.active else job.epoch


def _on_disk(paths: JobPaths, dead: int) -> list[_Found]:
    """Of attempts up to ``dead``; the oldest first."""
    found = []
    with as_owner(paths.root):
        for step, epoch, directory in checkpoint_dirs(paths.checkpoints):
            if epoch <= dead:
                pinned, committed = (directory / PINNED_NAME).exists(), (directory / MANIFEST_NAME).exists()
                found.append(_Found(directory, (step, epoch), _size(directory), pinned, committed))
    return found[::-1]


def _set_aside(paths: JobPaths) -> list[_Found]:
    with as_owner(paths.root):
        found = sorted(paths.quarantine.iterdir()) if paths.quarantine.is_dir() else []
        # a second one set aside ends in .1
        return [_Found(at, parse_checkpoint_dir_name(".".join(at.name.split(".")[:2])), _size(at)) for at in found]


def _left_behind(session: Session, job: Job, found: list[_Found]) -> list[_Found]:
    """Those of ``found`` that go."""
    segments, out = lineage_of(session, job), []
    for one in found:
        assert one.id is not None
        row = session.get(Checkpoint, (job.id, *one.id))
        pinned = one.pinned or (row is not None and row.pinned)
        if not pinned and not (one.committed and holds(segments, *one.id)):
            out.append(one)
    return out


def _deleted(one: _Found, refused: list[str], *, pinned: bool) -> bool:
    """Delete what no row speaks of, or with ``pinned`` what was set aside."""
    with as_owner(one.directory):
        try:
            if not pinned:
                return delete_unless_pinned(one.directory)
            delete(one.directory)
        except CheckpointError as error:
            refused.append(error.detail)
            return False
    return True


def _record(session: Session, job: Job, removed: list[_Found], emptied: list[_Found], refused: list[str]) -> None:
    for one in emptied:
        row = session.get(Checkpoint, (job.id, *one.id)) if one.id is not None else None
        if row is not None and row.state == "quarantined":
            row.state = "deleted"
    for said in refused:
        add_event(session, job.id, "checkpoint-not-deleted", said)
    if removed or emptied:
        told = _result(False, removed, emptied)
        data = {"checkpoints": told.checkpoints, "quarantined": told.quarantined, "size": told.size}
        text = f"removed: {counted(len(removed), 'checkpoint')} that no attempt starts from" + (
            f", and {len(emptied)} damaged" if emptied else ""
        )
        add_event(session, job.id, "checkpoints-pruned", text, data=data)


def _result(dry_run: bool, going: list[_Found], aside: list[_Found]) -> PruneResult:
    names, others = [one.directory.name for one in going], [one.directory.name for one in aside]
    return PruneResult(
        dry_run=dry_run, checkpoints=names, quarantined=others, size=sum(one.size for one in (*going, *aside))
    )


def _size(directory: Path) -> int:
    """Bytes of its files; what goes meanwhile counts nothing. Call it within ``as_owner``."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:
            continue
    return total
