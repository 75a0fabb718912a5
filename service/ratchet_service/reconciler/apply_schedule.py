"""Carries out, in the transaction that has made the second decision, what it says of jobs that do not start. A job whose row
another transaction holds is left to the next pass."""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa
from pydantic import ValidationError
from sqlalchemy.orm import Session

from ratchet_contract.phases import Cause, Desired, Event, JobPhase, JobReason, Reason
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Job
from ratchet_service.db.transitions import apply
from ratchet_service.scheduling import queue_queries
from ratchet_service.scheduling.preemption import Running
from ratchet_service.scheduling.scheduler import End, Row, Wait


def locked_job(session: Session, row: Row) -> Job | None:
    """Lock the row of a queued job and return it; None: the row has changed since it was read as ``row``, or another transaction
    holds it."""
    unchanged = Job.id == row.queued.job, Job.phase == JobPhase.QUEUED, Job.version == row.version
    query = sa.select(Job).where(*unchanged).with_for_update(skip_locked=True)
    return session.scalar(query.execution_options(populate_existing=True))


def apply_ends(session: Session, ends: Sequence[End]) -> None:
    """End the jobs of ``ends``."""
    for row, decision in ends:
        job = locked_job(session, row)
        if job is not None and decision.event is not None:
            apply(session, job.id, decision.event, reason=decision.reason, message=decision.message)


def end_unreadable(session: Session, job: Job, error: ValidationError) -> None:
    """End a locked job as failed, because its stored spec cannot be validated; the message names the first error."""
    first = error.errors(include_url=False, include_input=False)[0]
    text = (
        f"this version of Ratchet cannot read the stored spec: {first['msg']} at {first['loc']}; submit the job again"
    )
    apply(session, job.id, Event.END_FAILED, reason=Reason.SPEC_UNREADABLE, message=text)


def apply_waits(session: Session, waits: Sequence[Wait], *, may_stop: bool) -> None:
    """Store why jobs wait, and request the stop of the attempts that make room for them. The ETags of the waiting jobs do not
    change. ``may_stop`` False: no attempt is stopped."""
    session.flush()
    versions = queue_queries.lock_versions(session, [wait.row.queued.job for wait in waits])
    for wait in waits:
        if versions.get(wait.row.queued.job) != wait.row.version:
            continue
        if wait.victims and not (may_stop and _preempt(session, wait.row, wait.victims)):
            wait = wait._replace(is_freed=False)
        if wait.is_new:
            update = sa.update(Job).where(Job.id == wait.row.queued.job)
            update = update.values(reason=wait.reason, message=wait.full_message)
            session.execute(update.execution_options(synchronize_session=False))


def store_wait_reason(job: Job, reason: JobReason, message: str) -> bool:
    """Set reason and message of a locked job; False if it has both already. Its ETag does not change."""
    if (job.reason, job.message) == (reason, message):
        return False
    job.reason, job.message = reason, message
    return True


def _preempt(session: Session, row: Row, victims: Sequence[Running]) -> bool:
    """Request the stop of all ``victims`` for the job of ``row``, which is locked. Return False, without a change, if one may not
    be stopped now."""
    job = session.get_one(Job, row.queued.job, populate_existing=True)
    if not _still_stoppable(session, job, victims):
        return False
    for one in victims:
        message = (
            f"stopped for job {job.id} of priority {job.priority}: it is queued again and continues from its checkpoint"
        )
        apply(
            session,
            one.job,
            Event.PREEMPT,
            expected_attempt=one.attempt,
            cause=Cause.HIGHER_PRIORITY,
            reason=Cause.HIGHER_PRIORITY,
            message=message,
            data={"for": job.id, "priority": job.priority},
        )
    job.preempting_since = now_in(session)
    session.flush()
    return True


def _still_stoppable(session: Session, job: Job, victims: Sequence[Running]) -> bool:
    """Lock the victims' rows; True if all could be locked and may still be stopped for ``job``."""
    attempts = {one.job: one.attempt for one in victims}
    # no wait for a locked row: its transaction may wait for a row that is locked here
    query = sa.select(Job).where(Job.id.in_(attempts)).with_for_update(skip_locked=True)
    rows = list(session.scalars(query.execution_options(populate_existing=True)))
    return len(rows) == len(attempts) and all(
        row.attempt == attempts[row.id]
        and row.phase in (JobPhase.STARTING, JobPhase.RUNNING)
        and row.desired is Desired.RUN
        and row.priority < job.priority
        for row in rows
    )
