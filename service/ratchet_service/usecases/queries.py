"""Finding rows by what a caller named, or ``NotFound``."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.errors import NotFound
from ratchet_contract.lineage import lineage
from ratchet_contract.paths import checkpoint_dir_name, is_job_id, parse_checkpoint_dir_name
from ratchet_contract.phases import JobPhase
from ratchet_contract.resume import Segment
from ratchet_service.ancestry import bases_of, committed_of, fork_of, within
from ratchet_service.models import Attempt, Checkpoint, Job
from ratchet_service.transitions import lock_job, no_such_job

_MAX_INT = 2**63 - 1


def find_job(session: Session, job_id: str) -> Job:
    job = session.get(Job, job_id) if is_job_id(job_id) else None
    if job is None:
        raise no_such_job(job_id)
    return job


def hold_job(session: Session, job_id: str) -> Job:
    """The same, held until the transaction ends."""
    if not is_job_id(job_id):
        raise no_such_job(job_id)
    return lock_job(session, job_id)


def find_attempt(session: Session, job_id: str, number: str) -> Attempt:
    """``number`` as it stands in the path."""
    find_job(session, job_id)
    whole = int(number) if number.isascii() and number.isdigit() and len(number) < 19 else 0
    attempt = session.get(Attempt, (job_id, whole))
    if attempt is None:
        raise NotFound(f"job {job_id} has no attempt {number!r}", code="attempt-not-found")
    return attempt


def find_checkpoint(session: Session, job_id: str, checkpoint_id: str) -> Checkpoint:
    find_job(session, job_id)
    parsed = parse_checkpoint_dir_name(checkpoint_id)
    row = None
    if parsed is not None and checkpoint_dir_name(*parsed) == checkpoint_id and parsed[1] <= _MAX_INT:
        row = session.get(Checkpoint, (job_id, *parsed))
    if row is None:
        raise NotFound(f"job {job_id} has no checkpoint {checkpoint_id!r}", code="checkpoint-not-found")
    return row


def committed_in_lineage(session: Session, job: Job) -> list[Checkpoint]:
    """Committed checkpoints that the job's next attempt could start from if nothing else is wished, newest first."""
    return within(lineage_of(session, job), committed_of(session, job.id))


def lineage_of(session: Session, job: Job) -> list[Segment]:
    """What leads to where the job stands, as its attempts recorded it; what a resume wishes for lies within."""
    return lineage(bases_of(session, job.id), fork=fork_of(job))


def waiting_forks(session: Session, job_id: str, checkpoints: set[str] | None = None) -> list[str]:
    """Jobs forked from this job (from one of ``checkpoints``) that may still have to read the source: not ended for good,
    and without a committed checkpoint of their own."""
    query = sa.select(Job.id, Job.forked_from).where(
        Job.forked_from.startswith(f"{job_id}/", autoescape=True),
        Job.phase != JobPhase.SUCCEEDED,
        Job.committed_epoch.is_(None),
    )
    rows = session.execute(query).all()
    return [fork for fork, origin in rows if checkpoints is None or str(origin).partition("/")[2] in checkpoints]
