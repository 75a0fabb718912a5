"""A job's lineage from its rows: the one place that reads the input of ``lineage``."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.checkpoint.resume_report import Base, Segment, lineage_contains
from ratchet_contract.protocol.lineage import lineage
from ratchet_contract.protocol.messages import ForkSource
from ratchet_service.db.models import Attempt, Checkpoint, Job


def bases_of(session: Session, job_id: str) -> dict[int, Base]:
    """Return the base of every attempt that recorded one."""
    query = sa.select(Attempt.number, Attempt.base_step, Attempt.base_attempt, Attempt.base_digest)
    rows = session.execute(query.where(Attempt.job_id == job_id, Attempt.base_step.is_not(None)))
    return {number: Base(step=step or 0, attempt=attempt, digest=digest) for number, step, attempt, digest in rows}


def fork_of(job: Job) -> ForkSource | None:
    return None if job.fork_source is None else ForkSource.model_validate(job.fork_source)


def committed_of(session: Session, job_id: str) -> list[Checkpoint]:
    """Return every committed checkpoint, of any branch; newest first."""
    query = sa.select(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.state == "committed")
    return list(session.scalars(query.order_by(Checkpoint.step.desc(), Checkpoint.attempt.desc())))


def filter_lineage(segments: list[Segment], rows: list[Checkpoint]) -> list[Checkpoint]:
    """Return those of ``rows`` that are in the lineage, in their order."""
    return [row for row in rows if lineage_contains(segments, row.step, row.attempt)]


def committed_in_lineage(session: Session, job: Job) -> list[Checkpoint]:
    """Return committed checkpoints that the job's next attempt could start from unless a resume requests another, newest
    first."""
    return filter_lineage(lineage_of(session, job), committed_of(session, job.id))


def lineage_of(session: Session, job: Job) -> list[Segment]:
    """Return the lineage of the job's current state, as its attempts recorded it; a checkpoint that a resume requests is in
    it."""
    return lineage(bases_of(session, job.id), fork=fork_of(job))
