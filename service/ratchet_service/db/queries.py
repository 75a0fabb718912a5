"""Queries for jobs, attempts and checkpoints by the ids that a request names, for forks of a job, and for ETags."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.paths import checkpoint_dir_name, is_job_id, parse_checkpoint_dir_name
from ratchet_contract.phases import JobPhase
from ratchet_service.db.models import Attempt, Checkpoint, Job
from ratchet_service.db.transitions import lock_job, no_such_job


def find_job(session: Session, job_id: str) -> Job:
    """Return the job; it is not locked. Raises ``NotFound``, also for a text that is not a job id."""
    job = session.get(Job, job_id) if is_job_id(job_id) else None
    if job is None:
        raise no_such_job(job_id)
    return job


def find_job_for_update(session: Session, job_id: str) -> Job:
    """As ``find_job``, but lock the job's row until the write transaction ends; blocks while another transaction holds it."""
    if not is_job_id(job_id):
        raise no_such_job(job_id)
    return lock_job(session, job_id)


def find_attempt(session: Session, job_id: str, number: str) -> Attempt:
    """Return the attempt whose number is ``number``, a text from the request's path. Raises ``NotFound``."""
    find_job(session, job_id)
    whole = int(number) if number.isascii() and number.isdigit() and len(number) < 19 else 0
    attempt = session.get(Attempt, (job_id, whole))
    if attempt is None:
        raise NotFound(f"job {job_id} has no attempt {number!r}", code="attempt-not-found")
    return attempt


def find_checkpoint(session: Session, job_id: str, checkpoint_id: str) -> Checkpoint:
    """Return the checkpoint with this id, the name of its directory. Raises ``NotFound``."""
    find_job(session, job_id)
    parsed = parse_checkpoint_dir_name(checkpoint_id)
    row = None
    if parsed is not None and checkpoint_dir_name(*parsed) == checkpoint_id:
        row = session.get(Checkpoint, (job_id, *parsed))
    if row is None:
        raise NotFound(f"job {job_id} has no checkpoint {checkpoint_id!r}", code="checkpoint-not-found")
    return row


def waiting_forks(session: Session, job_id: str, checkpoints: set[str] | None = None) -> list[str]:
    """Return the ids of the job's forks that may still have to read one of its ``checkpoints`` (None: any of them)."""
    query = sa.select(Job.id, Job.forked_from).where(
        Job.forked_from.startswith(f"{job_id}/", autoescape=True),
        Job.phase != JobPhase.SUCCEEDED,
        Job.committed_attempt.is_(None),
    )
    rows = session.execute(query).all()
    return [fork for fork, origin in rows if checkpoints is None or str(origin).partition("/")[2] in checkpoints]


def etag(job: Job) -> str:
    """Return the job's ETag, with its quotes. It does not change with the job's progress."""
    return f'"{job.version}"'


def require_match(job: Job, if_match: str | None) -> None:
    """Raise ``Refused`` (``precondition-failed``) if the job's ETag does not match the header If-Match (RFC 9110); None: no
    header."""
    if if_match is None:
        return
    tags = [tag.strip() for tag in if_match.split(",")]
    if "*" not in tags and etag(job) not in tags:
        raise Refused(
            f"the job has changed: its ETag is now {etag(job)}, not {if_match}; read it again",
            code="precondition-failed",
        )
