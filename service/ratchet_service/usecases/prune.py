"""Removing what no attempt of a job will start from: asked for by a user, since a branch may be wanted for a fork."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.orm import Session

from ratchet_contract.api import PruneResult
from ratchet_contract.api_requests import PruneRequest
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, PINNED_NAME, HomePaths, JobPaths, parse_checkpoint_dir_name
from ratchet_contract.resume import holds
from ratchet_service.file_owner import as_owner
from ratchet_service.models import Checkpoint, Job
from ratchet_service.transitions import add_event
from ratchet_service.usecases.queries import hold_job, lineage_of
from ratchet_store.commit import checkpoint_dirs
from ratchet_store.retain import delete, delete_unless_pinned


def prune(session: Session, job_id: str, request: PruneRequest, homes: HomePaths) -> PruneResult:
    """Delete what the job's lineage does not hold, and what was never committed or not deleted to its end.

    Left alone: what is pinned (a fork pins its source), and everything of the present attempt while one may be alive. The files
    decide, not the rows: a zombie's checkpoints have none. What the system refuses is an event, and not among what is told.
    """
    job = hold_job(session, job_id)
    paths = homes.job(job_id)
    removed: list[str] = []
    aside: list[str] = []
    size = 0
    for directory in _left_behind(session, job, paths):
        weight = _size(directory)
        if request.dry_run or _gone(session, job, directory):
            removed.append(directory.name)
            size += weight
    for directory in _set_aside(paths) if request.quarantined else ():
        weight = _size(directory)
        if request.dry_run or _gone(session, job, directory, pinned=True):
            aside.append(directory.name)
            size += weight
    if not request.dry_run and (removed or aside):
        data = {"checkpoints": removed, "quarantined": aside, "size": size}
        text = f"{len(removed)} checkpoints that no attempt starts from were removed" + (
            f", and {len(aside)} damaged ones" if aside else ""
        )
        add_event(session, job.id, "checkpoints-pruned", text, data=data)
    session.flush()
    return PruneResult(dry_run=request.dry_run, checkpoints=removed, quarantined=aside, size=size)


def _set_aside(paths: JobPaths) -> list[Path]:
    with as_owner(paths.root):
        return sorted(paths.quarantine.iterdir()) if paths.quarantine.is_dir() else []


def _left_behind(session: Session, job: Job, paths: JobPaths) -> Iterator[Path]:
    """Oldest first."""
    segments = lineage_of(session, job)
    dead = job.epoch - 1 if job.phase.active else job.epoch
    with as_owner(paths.root):
        found = [
            (step, epoch, directory, (directory / PINNED_NAME).exists(), (directory / MANIFEST_NAME).exists())
            for step, epoch, directory in checkpoint_dirs(paths.checkpoints)
        ]
    for step, epoch, directory, marked, committed in reversed(found):
        row = session.get(Checkpoint, (job.id, step, epoch))
        pinned = (row is not None and row.pinned) or marked
        wanted = holds(segments, step, epoch) and committed
        if epoch <= dead and not pinned and not wanted:
            yield directory


def _gone(session: Session, job: Job, directory: Path, *, pinned: bool = False) -> bool:
    """Delete it, and let its row say so."""
    try:
        with as_owner(directory):
            if pinned:
                delete(directory)
            elif not delete_unless_pinned(directory):
                return False
    except CheckpointError as error:
        add_event(session, job.id, "checkpoint-not-deleted", error.detail)
        return False
    parsed = parse_checkpoint_dir_name(".".join(directory.name.split(".")[:2]))  # a second one set aside ends in .1
    row = session.get(Checkpoint, (job.id, *parsed)) if parsed is not None else None
    if row is not None and row.state == ("quarantined" if pinned else "committed"):
        row.state = "deleted"
    return True


def _size(directory: Path) -> int:
    """Bytes of its files; what goes meanwhile counts nothing."""
    total = 0
    with as_owner(directory):
        for path in directory.rglob("*"):
            try:
                total += path.lstat().st_size
            except OSError:
                continue
    return total
