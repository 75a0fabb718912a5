"""Checkpoints that no attempt will want: deleted by the service once the attempt that might write is proved dead.

A worker deletes only what its own attempt committed, so every attempt leaves up to ``keep_last`` behind; what goes beyond that
over all attempts goes here, and so do the remains of saves that a kill cut short. What was found damaged while the attempt might
have been using it is set aside.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from sqlalchemy.orm import Session

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, JobPaths
from ratchet_contract.resume import Segment
from ratchet_service.ancestry import bases_of, committed_of, within
from ratchet_service.file_owner import as_owner, names_in
from ratchet_service.models import Checkpoint, Job
from ratchet_service.retention import rules_of, values_of
from ratchet_service.transitions import add_event
from ratchet_service.usecases.queries import waiting_forks
from ratchet_store.lineage import set_aside
from ratchet_store.retain import retain, sweep


def tidy(session: Session, job: Job, paths: JobPaths, segments: list[Segment], epoch: int) -> None:
    """Apply the spec's rules (``ratchet_store.keeping``) to the whole lineage; what is pinned, wished for by a resume, or the
    last verified one stays too.

    Runs inside the transaction that ends attempt ``epoch``, with the job's row locked. A crash in the middle leaves rows whose
    manifest is gone; the next run marks them. What cannot be deleted becomes an event: it costs space, nothing else.
    """
    for row in committed_of(session, job.id):
        if row.verification == "damaged":
            quarantine(session, job, row, paths)
    session.flush()
    committed, rules = committed_of(session, job.id), rules_of(job)
    protected = {(c.step, c.epoch) for c in committed if c.pinned}
    verified = [c for c in within(segments, committed) if c.verification == "ok"]
    protected |= {(c.step, c.epoch) for c in verified[:1]}
    if job.resume_from is not None:
        protected.add((job.resume_from["step"], job.resume_from["epoch"]))
    values = values_of(session, job, committed, bases_of(session, job.id))

    def is_here(row: Checkpoint) -> bool:
        with as_owner(paths.root):
            return (paths.checkpoint(row.step, row.epoch) / MANIFEST_NAME).exists()

    def delete() -> None:
        retain(
            paths.checkpoints,
            keep_last=rules.keep_last,
            keep_every=rules.keep_every,
            keep_best=rules.keep_best,
            values=values,
            lineage=segments,
            protected=protected,
            first={(c.step, c.epoch) for c in committed if c.reason == "first"},
        )

    lost = {row.name for row in committed if not is_here(row)}
    _told(session, job, epoch, paths, delete)
    _told(session, job, epoch, paths, lambda: sweep(paths.checkpoints, dead_epochs=range(1, epoch + 1)))
    _reserves(paths, epoch)
    for row in committed:
        # Gone by a rule, or lost with its disk: then its copy still counts, and the next attempt fetches it.
        if not is_here(row) and (row.uploaded_at is None or row.name not in lost):
            row.state = "deleted"
    session.flush()


def quarantine(session: Session, job: Job, row: Checkpoint, paths: JobPaths) -> bool:
    """Set aside a checkpoint that was found damaged, with an event; the job's row is held and no attempt of it is alive. False:
    it is not here any more, a fork that has not begun yet is to meet the damage, or the system refuses, which is an event."""
    directory = paths.checkpoint(row.step, row.epoch)
    if not directory.is_dir() or waiting_forks(session, job.id, {row.name}):
        return False
    try:
        with as_owner(paths.root):
            set_aside(directory, paths.quarantine)
    except CheckpointError as error:
        add_event(session, job.id, "checkpoint-not-quarantined", error.detail, epoch=row.epoch)
        return False
    row.state = "quarantined"
    text = f"checkpoint {row.name} is damaged and was set aside: {row.verification_error}"
    add_event(session, job.id, "checkpoint-quarantined", text, epoch=row.epoch, data={"checkpoint": row.name})
    return True


def _told(session: Session, job: Job, epoch: int, paths: JobPaths, act: Callable[[], object]) -> None:
    try:
        with as_owner(paths.root):
            act()
    except CheckpointError as error:
        add_event(session, job.id, "checkpoint-not-deleted", error.detail, epoch=epoch)


def _reserves(paths: JobPaths, epoch: int) -> None:
    """The room that ranks and agents keep for their results is of no use to dead ones; who was killed has not given it back."""
    root = paths.attempt(epoch).root
    with as_owner(root):
        nodes = [root / name for name in names_in(root) if name.startswith("node-")]
        for folder in (root, root / "results", *nodes):
            for name in names_in(folder):
                if name.endswith(".reserve"):
                    with suppress(OSError):
                        (folder / name).unlink()
