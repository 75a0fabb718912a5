"""A job's checkpoints: list them, read, verify and pin one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.views import CheckpointDetail, CheckpointView, Page, VerifyResult
from ratchet_contract.atomic_write import fsync_path
from ratchet_contract.errors import CheckpointError, Conflict
from ratchet_contract.paths import MANIFEST_NAME, PINNED_NAME, VERIFIED_NAME, HomePaths
from ratchet_contract.phases import EventType
from ratchet_service.checkpoints import object_store
from ratchet_service.checkpoints.cleanup import metric_values_of, quarantine
from ratchet_service.checkpoints.lineage import bases_of, committed_in_lineage, lineage_of
from ratchet_service.db import audit
from ratchet_service.db.clock import now_in
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Checkpoint, Job
from ratchet_service.db.queries import find_checkpoint, find_job, find_job_for_update, waiting_forks
from ratchet_service.db.transitions import add_event
from ratchet_service.isolation.file_access import as_owner
from ratchet_service.usecases import pagination
from ratchet_service.usecases.views import checkpoint_view
from ratchet_store.format.manifest_file import read_manifest
from ratchet_store.read.checkpoint_reader import VerifyOutcome, verify

State = Literal["committed", "quarantined", "deleted"]
STORED: tuple[State, ...] = ("committed", "quarantined")


def list_checkpoints(
    session: Session, job_id: str, states: tuple[State, ...], limit: int, cursor: str | None
) -> Page[CheckpointView]:
    """Return a page of the job's checkpoints, newest step first. ``states`` empty: the committed and the quarantined ones. Raise
    ``NotFound`` or ``Refused``."""
    job = find_job(session, job_id)
    wanted = sorted(states or STORED)
    digest = pagination.query_digest(of="checkpoints", job=job_id, states=wanted)
    query = sa.select(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.state.in_(wanted))
    after = pagination.decode(cursor, digest, (int, int))
    if after is not None:
        query = query.where(sa.tuple_(Checkpoint.step, Checkpoint.attempt) < sa.tuple_(after[0], after[1]))
    rows = list(session.scalars(query.order_by(Checkpoint.step.desc(), Checkpoint.attempt.desc()).limit(limit + 1)))
    page = rows[:limit]
    following = pagination.encode(digest, [page[-1].step, page[-1].attempt]) if len(rows) > limit else None
    return Page[CheckpointView](items=_views(session, job, page), next_cursor=following)


def _views(session: Session, job: Job, rows: Sequence[Checkpoint]) -> list[CheckpointView]:
    """Return the API's views of the rows, with each one's place in the lineage and its metric."""
    segments, values = lineage_of(session, job), metric_values_of(session, job, rows, bases_of(session, job.id))
    return [checkpoint_view(row, segments, values.get((row.step, row.attempt))) for row in rows]


def checkpoint_detail(session: Session, job_id: str, checkpoint_id: str, homes: HomePaths) -> CheckpointDetail:
    """Return a checkpoint with its manifest, which is None if no valid one can be read from the disk. Raise ``NotFound``."""
    row = find_checkpoint(session, job_id, checkpoint_id)
    try:
        with as_owner(homes.job(job_id).root):
            manifest = json.loads(read_manifest(homes.job(job_id).checkpoint(row.step, row.attempt)).model_dump_json())
    except CheckpointError:
        manifest = None
    (view,) = _views(session, find_job(session, job_id), [row])
    return CheckpointDetail(**view.model_dump(), manifest=manifest)


def verify_bytes(database: Database, job_id: str, checkpoint_id: str, homes: HomePaths) -> tuple[VerifyOutcome, float]:
    """Verify every byte of a checkpoint, which may be fetched from the object store first. Return the outcome and the seconds
    without the fetch. The database is not changed; the marker file of a verified checkpoint is created or removed. Raise
    ``Conflict`` if there is nothing to verify, ``CheckpointError`` or ``NotFound``."""
    with database.read() as session:
        row, job = find_checkpoint(session, job_id, checkpoint_id), find_job(session, job_id)
    if row.state != "committed":
        raise Conflict(f"checkpoint {row.name} is {row.state}: there is nothing to verify", code="checkpoint-gone")
    object_store.ensure_local(homes, job, row)
    begin = time.monotonic()
    directory = homes.job(job_id).checkpoint(row.step, row.attempt)
    with as_owner(directory):
        outcome = _verify_and_mark(directory, row)
    return outcome, time.monotonic() - begin


def _verify_and_mark(directory: Path, row: Checkpoint) -> VerifyOutcome:
    """Verify the checkpoint in ``directory``, create or remove its marker file, and return the outcome. Raise as
    ``verify_bytes`` does."""
    try:
        outcome = verify(directory)
    except CheckpointError as error:
        if error.code == "checkpoint-missing":
            raise Conflict(f"checkpoint {row.name} is no longer on the disk", code="checkpoint-gone") from None
        raise
    if outcome.ok and read_manifest(directory).digest != row.digest:
        outcome = VerifyOutcome(False, "its manifest differs from the recorded one", outcome.bytes_checked)
    _mark_verified(directory, outcome.ok)
    if not (directory / MANIFEST_NAME).exists():  # a deletion, which begins with the manifest
        raise Conflict(f"checkpoint {row.name} was deleted while it was read", code="checkpoint-gone")
    return outcome


def _mark_verified(directory: Path, ok: bool) -> None:
    """Create (``ok``) or remove, durably, the marker file of a verified checkpoint, which the worker's retention reads.
    Failures are ignored."""
    with suppress(OSError):
        if ok:
            (directory / VERIFIED_NAME).touch()
        else:
            (directory / VERIFIED_NAME).unlink(missing_ok=True)
        fsync_path(directory)


def record_verification(
    session: Session, job_id: str, checkpoint_id: str, result: tuple[VerifyOutcome, float], homes: HomePaths
) -> VerifyResult:
    """Record the result of ``verify_bytes`` and return the API's view of it. A damaged checkpoint is quarantined if possible, but
    not while the job is active. Raise ``Conflict`` if the checkpoint was deleted meanwhile, or ``NotFound``."""
    job = find_job_for_update(session, job_id)
    row = find_checkpoint(session, job_id, checkpoint_id)
    if row.state == "deleted":
        raise Conflict(f"checkpoint {row.name} was deleted while it was verified", code="checkpoint-gone")
    outcome, seconds = result
    verdict: Literal["ok", "damaged"] = "ok" if outcome.ok else "damaged"
    row.verified_at, row.verification, row.verification_error = now_in(session), verdict, outcome.error
    facts = {"checkpoint": row.name, "verification": verdict, "error": outcome.error}
    add_event(session, job_id, EventType.VERIFIED, f"checkpoint {row.name}: {verdict}", attempt=row.attempt, data=facts)
    session.flush()
    if (
        not outcome.ok
        and row.state == "committed"
        and not job.phase.active
        and quarantine(session, job, row, homes.job(job_id))
    ):
        session.flush()
        _fall_back_to_older(session, job, row)
    facts = {"checkpoint": row.name, "verification": verdict, "state": row.state}
    audit.record(session, AuditAction.VERIFY, "job", job_id, job.owner, facts)
    return VerifyResult(
        id=row.name,
        state="quarantined" if row.state == "quarantined" else "committed",
        verification=verdict,
        error=outcome.error,
        bytes_checked=outcome.bytes_checked,
        seconds=round(seconds, 6),
    )


def _fall_back_to_older(session: Session, job: Job, quarantined: Checkpoint) -> None:
    """Correct the job's row if ``quarantined`` was the job's newest checkpoint; otherwise do nothing. The row then names the
    newest remaining checkpoint of the job's lineage. If there is none, it has the step at which the job began."""
    if (job.committed_step, job.committed_attempt) != (quarantined.step, quarantined.attempt):
        return
    newest = next(iter(committed_in_lineage(session, job)), None)
    if newest is not None:
        job.committed_step, job.committed_attempt = newest.step, newest.attempt
    else:
        job.committed_step = 0 if job.fork_source is None else job.fork_source["step"]
        job.committed_attempt = None
    session.flush()


def pin(session: Session, job_id: str, checkpoint_id: str, pinned: bool, homes: HomePaths) -> CheckpointView:
    """Pin or unpin a checkpoint, and return it. Raise ``NotFound`` if there is no such checkpoint. Raise ``Conflict`` if the
    checkpoint is not committed or cannot be pinned on the disk. Raise ``Conflict`` also if a fork that has not started yet needs
    the pin that is to be removed."""
    job = find_job_for_update(session, job_id)
    row = find_checkpoint(session, job_id, checkpoint_id)
    if row.state != "committed":
        raise Conflict(f"checkpoint {row.name} is {row.state}: it cannot be pinned", code="checkpoint-gone")
    forks = [] if pinned else waiting_forks(session, job_id, {row.name})
    if forks:
        raise Conflict(f"job {forks[0]} was forked from it and has not started from it yet", code="checkpoint-in-use")
    if row.pinned != pinned:
        set_pin(session, row, pinned, homes)
        word = EventType.PINNED if pinned else EventType.UNPINNED
        add_event(
            session, job_id, word, f"checkpoint {row.name} {word}", attempt=row.attempt, data={"checkpoint": row.name}
        )
        action = AuditAction.PIN if pinned else AuditAction.UNPIN
        audit.record(session, action, "job", job_id, job.owner, {"checkpoint": row.name})
    session.flush()
    return _views(session, job, [row])[0]


def set_pin(session: Session, row: Checkpoint, pinned: bool, homes: HomePaths) -> None:
    """Create or remove the marker file of the pin, and set the row. Raise ``Conflict`` if it cannot be created, or the manifest
    of the checkpoint to pin cannot be read."""
    directory = homes.job(row.job_id).checkpoint(row.step, row.attempt)
    name = row.name
    with as_owner(directory):
        _set_pin_marker(directory, name, pinned)
    row.pinned = pinned


def _set_pin_marker(directory: Path, name: str, pinned: bool) -> None:
    """Create or remove the marker file of a pin. Raise ``Conflict`` if it cannot be created, or the manifest of the checkpoint to
    pin cannot be read."""
    mark, made = directory / PINNED_NAME, False
    if not pinned:
        mark.unlink(missing_ok=True)
        return
    try:
        # before the manifest is read: a deletion removes the manifest before it checks for the marker file, so that
        # one of the two notices the other
        made = _create_marker(mark)
        fsync_path(directory)
        read_manifest(directory)
    except (OSError, CheckpointError):
        if made:  # one that already existed belongs to another pin
            mark.unlink(missing_ok=True)
        raise Conflict(f"checkpoint {name} is damaged or no longer on the disk", code="checkpoint-gone") from None


def _create_marker(mark: Path) -> bool:
    """Create the marker file and return True; return False if it already exists. Raise ``OSError``."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True
