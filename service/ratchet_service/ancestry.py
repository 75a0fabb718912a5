"""What a job's rows say about where it comes from: the input of ``lineage``, read in one place."""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy.orm import Session

from ratchet_contract.messages import ForkSource
from ratchet_contract.resume import Base, Segment, holds
from ratchet_service.models import Attempt, Checkpoint, Job


def bases_of(session: Session, job_id: str) -> dict[int, Base]:
    """The base of every attempt that recorded one."""
    query = sa.select(Attempt.number, Attempt.base_step, Attempt.base_epoch, Attempt.base_digest)
    rows = session.execute(query.where(Attempt.job_id == job_id, Attempt.base_step.is_not(None)))
    return {number: Base(step=step or 0, epoch=epoch, digest=digest) for number, step, epoch, digest in rows}


def fork_of(job: Job) -> ForkSource | None:
    return None if job.fork_source is None else ForkSource.model_validate(job.fork_source)


def committed_of(session: Session, job_id: str) -> list[Checkpoint]:
    """Every committed checkpoint, of any branch; newest first."""
    query = sa.select(Checkpoint).where(Checkpoint.job_id == job_id, Checkpoint.state == "committed")
    return list(session.scalars(query.order_by(Checkpoint.step.desc(), Checkpoint.epoch.desc())))


def within(segments: list[Segment], rows: list[Checkpoint]) -> list[Checkpoint]:
    """Those of ``rows`` that the lineage holds, in their order."""
    return [row for row in rows if holds(segments, row.step, row.epoch)]
