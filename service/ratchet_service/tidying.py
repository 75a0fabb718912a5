"""Checkpoints that no attempt will want: deleted by the service once the attempt that might write is proved dead.

A worker deletes only what its own attempt committed, so every attempt leaves up to ``keep_last`` behind; what goes beyond that
over all attempts goes here, and so do the remains of saves that a kill cut short. What was found damaged while the attempt might
have been using it is set aside.

``look`` reads the disk before the transaction that ends the attempt; ``mark`` decides in it; ``removal`` deletes behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from sqlalchemy.orm import Session

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, JobPaths
from ratchet_contract.resume import Segment
from ratchet_service import removal
from ratchet_service.ancestry import bases_of, committed_of, within
from ratchet_service.file_owner import as_owner, names_in
from ratchet_service.models import Checkpoint, Job
from ratchet_service.retention import rules_of, values_of
from ratchet_service.transitions import add_event
from ratchet_service.usecases.queries import waiting_forks
from ratchet_store.commit import checkpoint_dirs
from ratchet_store.keeping import Id, Rules
from ratchet_store.lineage import set_aside
from ratchet_store.retain import sweep, whole


@dataclass(frozen=True)
class OnDisk:
    """``here``: checkpoints that have a manifest; None: nobody can tell. ``whole``: those of the lineage that look whole, newest
    first, and whether they have the mark ``PINNED``. ``refused``: what could not be deleted; it costs space, nothing else."""

    here: frozenset[Id] | None
    whole: Mapping[Id, bool]
    refused: Sequence[str]


def look(paths: JobPaths, segments: list[Segment], epoch: int) -> OnDisk:
    """What there is, once remains of saves are gone, of attempts up to ``epoch``. All of these are dead, and the caller's lease
    keeps another from beginning. What the system refuses, or the job's code has made of the directory, keeps no attempt from
    being ended."""
    refused = []
    with as_owner(paths.root):
        try:
            sweep(paths.checkpoints, dead_epochs=range(1, epoch + 1))
        except (CheckpointError, OSError) as error:
            refused.append(str(error))
        _reserves(paths, epoch)
        try:
            found = ((step, of) for step, of, at in checkpoint_dirs(paths.checkpoints) if (at / MANIFEST_NAME).exists())
            return OnDisk(frozenset(found), whole(paths.checkpoints, segments), refused)
        except (CheckpointError, OSError) as error:
            refused.append(f"{paths.checkpoints} cannot be looked at, so nothing of it is deleted: {error}")
            return OnDisk(None, {}, refused)


def mark(session: Session, job: Job, paths: JobPaths, segments: list[Segment], on_disk: OnDisk, epoch: int) -> None:
    """Apply the spec's rules (``ratchet_store.keeping``) to the whole lineage; what is pinned, wished for by a resume, or the
    last verified one stays too. In the transaction that ends attempt ``epoch``, with the job's row held: ``removal`` does the
    rest."""
    aside = {
        (row.step, row.epoch)
        for row in committed_of(session, job.id)
        if row.verification == "damaged" and quarantine(session, job, row, paths)
    }
    session.flush()
    rows = {(row.step, row.epoch): row for row in committed_of(session, job.id)}
    for one, row in rows.items():
        if on_disk.here is not None and one not in on_disk.here and row.uploaded_at is None:
            row.state = "deleted"  # lost with its disk: a copy still counts, and is fetched
    committed, rules = list(rows.values()), rules_of(job)
    protected = {one for one, row in rows.items() if row.pinned}
    protected |= {(c.step, c.epoch) for c in [c for c in within(segments, committed) if c.verification == "ok"][:1]}
    if job.resume_from is not None:
        protected.add((job.resume_from["step"], job.resume_from["epoch"]))
    surplus = Rules.of(rules).surplus(
        [one for one in on_disk.whole if one not in aside],
        values_of(session, job, committed, bases_of(session, job.id)),
        {one for one, pinned in on_disk.whole.items() if pinned},
        {one for one, row in rows.items() if row.reason == "first"},
    )
    removal.mark(session, [rows[one] for one in surplus if one in rows and one not in protected])
    for said in on_disk.refused:
        add_event(session, job.id, "checkpoint-not-deleted", said, epoch=epoch)
    session.flush()


def quarantine(session: Session, job: Job, row: Checkpoint, paths: JobPaths) -> bool:
    """Set aside a checkpoint that was found damaged, with an event; the job's row is held and no attempt of it is alive. False:
    it is not here any more, a fork that has not begun yet is to meet the damage, or the system refuses, which is an event."""
    directory = paths.checkpoint(row.step, row.epoch)
    try:
        if not directory.is_dir() or waiting_forks(session, job.id, {row.name}):
            return False
        with as_owner(paths.root):
            set_aside(directory, paths.quarantine)
    except (CheckpointError, OSError) as error:
        add_event(session, job.id, "checkpoint-not-quarantined", str(error), epoch=row.epoch)
        return False
    row.state = "quarantined"
    text = f"checkpoint {row.name} is damaged and was set aside: {row.verification_error}"
    add_event(session, job.id, "checkpoint-quarantined", text, epoch=row.epoch, data={"checkpoint": row.name})
    return True


def _reserves(paths: JobPaths, epoch: int) -> None:
    """The room that ranks and agents keep for their results is of no use to dead ones; who was killed has not given it back. Call
    it within ``as_owner``."""
    root = paths.attempt(epoch).root
    nodes = [root / name for name in names_in(root) if name.startswith("node-")]
    for folder in (root, root / "results", *nodes):
        for name in names_in(folder):
            if name.endswith(".reserve"):
                with suppress(OSError):
                    (folder / name).unlink()
