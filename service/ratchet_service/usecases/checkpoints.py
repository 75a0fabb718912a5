"""What is stored of a job: listing, verification, pins."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.api import BaseView, CheckpointDetail, CheckpointView, Page, VerifyResult
from ratchet_contract.errors import CheckpointError, Conflict
from ratchet_contract.manifest import Manifest
from ratchet_contract.paths import MANIFEST_NAME, PINNED_NAME, VERIFIED_NAME, HomePaths
from ratchet_service import cursors, object_store
from ratchet_service.ancestry import bases_of
from ratchet_service.clock import now_in
from ratchet_service.database import Database
from ratchet_service.file_owner import as_owner
from ratchet_service.models import Checkpoint, Job
from ratchet_service.retention import values_of
from ratchet_service.tidying import quarantine
from ratchet_service.transitions import add_event
from ratchet_service.usecases.queries import (
    committed_in_lineage,
    find_checkpoint,
    find_job,
    hold_job,
    lineage_of,
    waiting_forks,
)
from ratchet_service.usecases.views import checkpoint_view
from ratchet_store.commit import read_manifest
from ratchet_store.files import fsync_dir
from ratchet_store.read import VerifyOutcome, verify

State = Literal["committed", "quarantined", "deleted"]
STORED: tuple[State, ...] = ("committed", "quarantined")


def list_checkpoints(
    session: Session, job_id: str, states: tuple[State, ...], limit: int, cursor: str | None
) -> Page[CheckpointView]:
    """Newest step first."""
    job = find_job(session, job_id)
    wanted = sorted(states or STORED)
    digest = cursors.query_digest(of="checkpoints", job=job_id, states=wanted)
    query = sa.select(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.state.in_(wanted))
    after = cursors.decode(cursor, digest, (int, int))
    if after is not None:
        query = query.where(sa.tuple_(Checkpoint.step, Checkpoint.epoch) < sa.tuple_(after[0], after[1]))
    rows = list(session.scalars(query.order_by(Checkpoint.step.desc(), Checkpoint.epoch.desc()).limit(limit + 1)))
    page = rows[:limit]
    following = cursors.encode(digest, [page[-1].step, page[-1].epoch]) if len(rows) > limit else None
    return Page[CheckpointView](items=_views(session, job, page), next_cursor=following)


def _views(session: Session, job: Job, rows: Sequence[Checkpoint]) -> list[CheckpointView]:
    segments, values = lineage_of(session, job), values_of(session, job, rows, bases_of(session, job.id))
    return [checkpoint_view(row, segments, values.get((row.step, row.epoch))) for row in rows]


def detail(session: Session, job_id: str, checkpoint_id: str, homes: HomePaths) -> CheckpointDetail:
    """With the manifest, where the disk still has one that is right."""
    row = find_checkpoint(session, job_id, checkpoint_id)
    try:
        with as_owner(homes.job(job_id).root):
            manifest = _shown(read_manifest(homes.job(job_id).checkpoint(row.step, row.epoch)))
    except CheckpointError:
        manifest = None
    (view,) = _views(session, find_job(session, job_id), [row])
    return CheckpointDetail(**view.model_dump(), manifest=manifest)


def _shown(manifest: Manifest) -> dict[str, Any]:
    """With the API's words."""
    data = json.loads(manifest.model_dump_json()) | {"parent": BaseView.of(manifest.parent).model_dump(mode="json")}
    return {"attempt" if key == "epoch" else key: value for key, value in data.items()}


def read_all_bytes(
    database: Database, job_id: str, checkpoint_id: str, homes: HomePaths
) -> tuple[VerifyOutcome, float]:
    """Check every byte; no transaction is open meanwhile. Returns what was found, and seconds.

    Raises ``Conflict`` (``checkpoint-gone``) where there is nothing to check, ``CheckpointError`` where the system does not
    give the files out.
    """
    with database.read() as session:
        row, job = find_checkpoint(session, job_id, checkpoint_id), find_job(session, job_id)
    if row.state != "committed":
        raise Conflict(f"checkpoint {row.name} is {row.state}: there is nothing to verify", code="checkpoint-gone")
    object_store.provide(homes, job, row)
    begin = time.monotonic()
    directory = homes.job(job_id).checkpoint(row.step, row.epoch)
    with as_owner(directory):
        outcome = _verified(directory, row)
    return outcome, time.monotonic() - begin


def _verified(directory: Path, row: Checkpoint) -> VerifyOutcome:
    """Raises as ``read_all_bytes`` does."""
    try:
        outcome = verify(directory)
    except CheckpointError as error:
        if error.code == "checkpoint-missing":
            raise Conflict(f"checkpoint {row.name} is not on the disk any more", code="checkpoint-gone") from None
        raise
    if outcome.ok and read_manifest(directory).digest != row.digest:
        outcome = VerifyOutcome(False, "its manifest is not the one that was recorded", outcome.bytes_checked)
    _mark_verified(directory, outcome.ok)
    if not (directory / MANIFEST_NAME).exists():  # whoever deletes begins with it: what is missing is no damage
        raise Conflict(f"checkpoint {row.name} was deleted while it was read", code="checkpoint-gone")
    return outcome


def _mark_verified(directory: Path, ok: bool) -> None:
    """Where the worker's retention looks. A directory that cannot be written to is none that anything is deleted from. Durably:
    a mark that came back beside what was found damaged would be kept in the place of a good one."""
    with suppress(OSError):
        if ok:
            (directory / VERIFIED_NAME).touch()
        else:
            (directory / VERIFIED_NAME).unlink(missing_ok=True)
        fsync_dir(directory)


def record_verification(
    session: Session, job_id: str, checkpoint_id: str, found: tuple[VerifyOutcome, float], homes: HomePaths
) -> VerifyResult:
    """Keep what ``read_all_bytes`` found. What is damaged is set aside, unless an attempt may be reading it: then that happens
    once the attempt has ended, or a resume meets it."""
    job = hold_job(session, job_id)
    row = find_checkpoint(session, job_id, checkpoint_id)
    outcome, seconds = found
    verdict: Literal["ok", "damaged"] = "ok" if outcome.ok else "damaged"
    row.verified_at, row.verification, row.verification_error = now_in(session), verdict, outcome.error
    facts = {"checkpoint": row.name, "verification": verdict, "error": outcome.error}
    add_event(session, job_id, "verified", f"checkpoint {row.name}: {verdict}", epoch=row.epoch, data=facts)
    session.flush()
    if (
        not outcome.ok
        and row.state == "committed"
        and not job.phase.active
        and quarantine(session, job, row, homes.job(job_id))
    ):
        session.flush()
        _stand_on_older(session, job, row)
    return VerifyResult(
        id=row.name,
        state="quarantined" if row.state == "quarantined" else "committed",
        verification=verdict,
        error=outcome.error,
        bytes_checked=outcome.bytes_checked,
        seconds=round(seconds, 6),
    )


def _stand_on_older(session: Session, job: Job, gone: Checkpoint) -> None:
    """Where the job's newest checkpoint is ``gone``, an attempt starts from the one before it: the steps since are at risk."""
    if (job.committed_step, job.committed_epoch) != (gone.step, gone.epoch):
        return
    newest = next(iter(committed_in_lineage(session, job)), None)
    if newest is not None:
        job.committed_step, job.committed_epoch = newest.step, newest.epoch
    else:
        job.committed_step = 0 if job.fork_source is None else job.fork_source["step"]
        job.committed_epoch = None
    session.flush()


def pin(session: Session, job_id: str, checkpoint_id: str, pinned: bool, homes: HomePaths) -> CheckpointView:
    """Keep a checkpoint whatever retention says, or let it go again. Raises ``Conflict`` (``checkpoint-gone``,
    ``checkpoint-in-use``)."""
    job = hold_job(session, job_id)
    row = find_checkpoint(session, job_id, checkpoint_id)
    if row.state != "committed":
        raise Conflict(f"checkpoint {row.name} is {row.state}: it cannot be pinned", code="checkpoint-gone")
    forks = [] if pinned else waiting_forks(session, job_id, {row.name})
    if forks:
        raise Conflict(f"job {forks[0]} was forked from it and has not started from it yet", code="checkpoint-in-use")
    if row.pinned != pinned:
        set_pin(session, row, pinned, homes)
        word = "pinned" if pinned else "unpinned"
        add_event(
            session, job_id, word, f"checkpoint {row.name} {word}", epoch=row.epoch, data={"checkpoint": row.name}
        )
    session.flush()
    return _views(session, job, [row])[0]


def set_pin(session: Session, row: Checkpoint, pinned: bool, homes: HomePaths) -> None:
    """The mark lies beside the files, where the worker's retention looks; the row follows.

    First the mark, durably, then a look at the manifest: who deletes takes the manifest away first and then looks for the mark,
    so one of the two notices the other (``ratchet_store.retain``). Raises ``Conflict`` (``checkpoint-gone``).
    """
    directory = homes.job(row.job_id).checkpoint(row.step, row.epoch)
    name = row.name
    with as_owner(directory):
        _set_mark(directory, name, pinned)
    row.pinned = pinned


def _set_mark(directory: Path, name: str, pinned: bool) -> None:
    mark, made = directory / PINNED_NAME, False
    if not pinned:
        mark.unlink(missing_ok=True)
        return
    try:
        made = _make(mark)
        fsync_dir(directory)
        read_manifest(directory)
    except (OSError, CheckpointError):
        if made:  # one that was there before is another pin's
            mark.unlink(missing_ok=True)
        raise Conflict(f"checkpoint {name} is not on the disk any more, or damaged", code="checkpoint-gone") from None


def _make(mark: Path) -> bool:
    """False: it was there."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True
