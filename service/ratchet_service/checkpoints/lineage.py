"""Reads from a job's rows its lineage, and the bases and the fork source from which a lineage is computed."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.checkpoint.resume_report import Base, Segment, lineage_contains
from ratchet_contract.protocol.lineage import lineage
from ratchet_contract.protocol.messages import ForkSource
from ratchet_service.db.models import Attempt, Checkpoint, Job


def bases_of(session: Session, job_id: str) -> dict[int, Base]:
    """Return attempt number -> base, the checkpoint that the attempt started from. A base with step 0 and no attempt means from
    scratch. Attempts without a recorded base are left out."""
    query = sa.select(Attempt.number, Attempt.base_step, Attempt.base_attempt, Attempt.base_digest)
    rows = session.execute(query.where(Attempt.job_id == job_id, Attempt.base_step.is_not(None)))
    return {number: Base(step=step or 0, attempt=attempt, digest=digest) for number, step, attempt, digest in rows}


def fork_of(job: Job) -> ForkSource | None:
    """Return the checkpoint that the job was forked from. For a job that adopted a run, return the copied checkpoint of this run.
    None for other jobs."""
    return None if job.fork_source is None else ForkSource.model_validate(job.fork_source)


def committed_of(session: Session, job_id: str) -> list[Checkpoint]:
    """Return every committed checkpoint of the job, of any branch, by step and then attempt, newest first."""
    query = sa.select(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.state == "committed")
    return list(session.scalars(query.order_by(Checkpoint.step.desc(), Checkpoint.attempt.desc())))


def filter_lineage(segments: list[Segment], rows: list[Checkpoint]) -> list[Checkpoint]:
    """Return those of ``rows`` that are in the lineage ``segments``, in the order of ``rows``."""
    return [row for row in rows if lineage_contains(segments, row.step, row.attempt)]


def committed_in_lineage(session: Session, job: Job) -> list[Checkpoint]:
    """Return the job's own committed checkpoints of its lineage, newest first. A requested resume (``resume_from``) is not
    considered."""
    return filter_lineage(lineage_of(session, job), committed_of(session, job.id))


def lineage_of(session: Session, job: Job) -> list[Segment]:
    """Return the job's lineage as segments, newest first: its own checkpoints that the next attempt may start from. A requested
    resume (``resume_from``) is not considered."""
    return lineage(bases_of(session, job.id), fork=fork_of(job))
