"""Cleans up a job's checkpoints when an attempt ends, once the attempt that might write is proved dead.

Before the transaction that ends the attempt, ``scan_disk`` deletes the remains of saves and reads which checkpoints the disk has.
Within it, ``mark_surplus`` marks the checkpoints that the spec's rules do not keep. After it, ``removal.delete_marked`` deletes
their files.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.checkpoint.resume_report import Base, Segment
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, JobPaths
from ratchet_contract.phases import EventType
from ratchet_contract.spec.checkpoint import CheckpointSpec
from ratchet_service.checkpoints import removal
from ratchet_service.checkpoints.lineage import bases_of, committed_of, filter_lineage
from ratchet_service.db.models import Checkpoint, Job, Metric
from ratchet_service.db.queries import waiting_forks
from ratchet_service.db.transitions import add_event
from ratchet_service.isolation.file_access import as_owner, names_in
from ratchet_store.format.manifest_file import checkpoint_dirs
from ratchet_store.read.find_base import move_to_quarantine
from ratchet_store.retention.delete import complete_checkpoints, sweep
from ratchet_store.retention.rules import Id, Rules


def checkpoint_spec_of(job: Job) -> CheckpointSpec:
    """Return the ``checkpoint`` part of the job's spec. Raises ``ValidationError``."""
    return CheckpointSpec.model_validate(job.spec["checkpoint"])


def metric_values_of(
    session: Session, job: Job, rows: Collection[Checkpoint], bases: Mapping[int, Base]
) -> dict[Id, float]:
    """Return (step, attempt) -> value of the ``keep_best`` metric, for those of ``rows`` that have one. ``bases``: by attempt."""
    best = checkpoint_spec_of(job).keep_best
    if best is None or not rows:
        return {}
    steps = sa.select(Checkpoint.step).where(Checkpoint.job_id == job.id)
    query = sa.select(Metric.step, Metric.attempt, Metric.value).where(
        Metric.job_id == job.id, Metric.name == best.metric, Metric.step.in_(steps)
    )
    logged = {step: (attempt, value) for step, attempt, value in session.execute(query)}
    found: dict[Id, float] = {}
    for row in rows:
        attempt, value = logged.get(row.step, (row.attempt, None))
        base = bases.get(attempt)
        began_here = base is not None and (base.step, base.attempt) == (row.step, row.attempt)
        # a value of another branch does not count; an evaluation that a stop cut short runs again after the resume
        if value is not None and not math.isnan(value) and (attempt == row.attempt or began_here):
            found[row.step, row.attempt] = value
    return found


@dataclass(frozen=True)
class OnDisk:
    """Result of ``scan_disk``. ``present``: all checkpoints with a manifest; None: the disk could not be read. ``complete``: the
    checkpoints of the lineage that look complete, newest first; the value is True if a marker file pins the checkpoint.
    ``errors``: texts of errors."""

    present: frozenset[Id] | None
    complete: Mapping[Id, bool]
    errors: Sequence[str]


def scan_disk(paths: JobPaths, segments: list[Segment], attempt: int) -> OnDisk:
    """Delete what interrupted saves of attempts up to ``attempt``, all dead, have left, and the files by which ``attempt``
    reserved disk space. Return which checkpoints the disk has, and the texts of errors. Errors with the reserved space are
    ignored."""
    refused = []
    with as_owner(paths.root):
        try:
            sweep(paths.checkpoints, dead_attempts=range(1, attempt + 1))
        except (CheckpointError, OSError) as error:
            refused.append(str(error))
        with suppress(OSError):
            _delete_reserve_files(paths, attempt)
        try:
            found = ((step, of) for step, of, at in checkpoint_dirs(paths.checkpoints) if (at / MANIFEST_NAME).exists())
            return OnDisk(frozenset(found), complete_checkpoints(paths.checkpoints, segments), refused)
        except (CheckpointError, OSError) as error:
            refused.append(f"{paths.checkpoints} cannot be read, so nothing in it is deleted: {error}")
            return OnDisk(None, {}, refused)


def mark_surplus(
    session: Session, job: Job, paths: JobPaths, segments: list[Segment], on_disk: OnDisk, attempt: int
) -> None:
    """Mark as deleted the checkpoints of the lineage that the spec's rules do not keep. Some stay in any case, such as pinned
    ones. Also mark all checkpoints of the job that have no copy left on the disk or in an object store. Quarantine those that a
    verification found damaged. Called in the transaction that ends the attempt."""
    aside = {
        (row.step, row.attempt)
        for row in committed_of(session, job.id)
        if row.verification == "damaged" and quarantine(session, job, row, paths)
    }
    session.flush()
    rows = {(row.step, row.attempt): row for row in committed_of(session, job.id)}
    for one, row in rows.items():
        if on_disk.present is not None and one not in on_disk.present and row.uploaded_at is None:
            row.state = "deleted"  # lost with its disk; one with a remote copy still counts, and is fetched
    committed, rules = list(rows.values()), checkpoint_spec_of(job)
    protected = {one for one, row in rows.items() if row.pinned}
    protected |= {
        (c.step, c.attempt) for c in [c for c in filter_lineage(segments, committed) if c.verification == "ok"][:1]
    }
    if job.resume_from is not None:
        protected.add((job.resume_from["step"], job.resume_from["attempt"]))
    surplus = Rules.from_spec(rules).surplus(
        [one for one in on_disk.complete if one not in aside],
        metric_values_of(session, job, committed, bases_of(session, job.id)),
        {one for one, pinned in on_disk.complete.items() if pinned},
        {one for one, row in rows.items() if row.reason == "first"},
    )
    removal.mark_deleted(session, [rows[one] for one in surplus if one in rows and one not in protected])
    for error in on_disk.errors:
        add_event(session, job.id, EventType.CHECKPOINT_NOT_DELETED, error, attempt=attempt)
    session.flush()


def quarantine(session: Session, job: Job, row: Checkpoint, paths: JobPaths) -> bool:
    """Move a damaged checkpoint to the quarantine, and update ``row``. Return False if it was not moved, for example because a
    fork may still read it. The caller has locked the job's row; no attempt of the job is alive."""
    directory = paths.checkpoint(row.step, row.attempt)
    try:
        if not directory.is_dir() or waiting_forks(session, job.id, {row.name}):
            return False
        with as_owner(paths.root):
            move_to_quarantine(directory, paths.quarantine)
    except (CheckpointError, OSError) as error:
        add_event(session, job.id, EventType.CHECKPOINT_NOT_QUARANTINED, str(error), attempt=row.attempt)
        return False
    row.state = "quarantined"
    text = f"checkpoint {row.name} is damaged and was moved to the quarantine: {row.verification_error}"
    add_event(
        session, job.id, EventType.CHECKPOINT_QUARANTINED, text, attempt=row.attempt, data={"checkpoint": row.name}
    )
    return True


def _delete_reserve_files(paths: JobPaths, attempt: int) -> None:
    """Delete the files with which the attempt, now dead, reserved disk space. Called within ``as_owner``. Raises ``OSError`` as
    ``names_in`` does."""
    root = paths.attempt(attempt).root
    nodes = [root / name for name in names_in(root) if name.startswith("node-")]
    for folder in (root, root / "results", *nodes):
        for name in names_in(folder):
            if name.endswith(".reserve"):
                with suppress(OSError):
                    (folder / name).unlink()
