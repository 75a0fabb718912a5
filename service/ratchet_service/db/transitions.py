"""The only place that changes a job's phase: one guarded UPDATE, and the row of its event in the same transaction.

Every writer of a job's events holds the lock on the job's row (by ``lock_job``, for example). So the ids of one job's events grow
in commit order, and a follower that remembers the last id misses none.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NewType

import sqlalchemy as sa
from sqlalchemy.engine import CursorResult
from sqlalchemy.orm import Session
from sqlalchemy.orm.interfaces import ORMOption

from ratchet_contract.errors import Conflict, NotFound
from ratchet_contract.phases import Cause, Desired, Event, EventType, JobPhase, JobReason, Step, next_step
from ratchet_service.db import models
from ratchet_service.db.clock import now_in
from ratchet_service.db.models import Job

NoteEventType = NewType("NoteEventType", str)
"""``note.TYPE``: the type of the event for a note. ``TYPE`` is usually a ``NoteType``, but ranks may send any text."""

_DETAILS = {
    "wrong-phase": "the job is {phase}; {event} does not apply to it",
    "job-ended": "the job has ended ({phase}); {event} no longer applies",
    "not-running": "the job is {phase} and has no running attempt; {event} needs one",
}
_CAUSES = {
    Desired.SUSPEND: Cause.API_SUSPEND,
    Desired.CANCEL: Cause.API_CANCEL,
    Desired.PREEMPT: Cause.API_PREEMPT,
}


def lock_job(session: Session, job_id: str, options: Sequence[ORMOption] = ()) -> Job:
    """Return the job, freshly read, with its row locked until the transaction ends. ``options``: columns not to load. Raises
    ``NotFound``."""
    query = sa.select(Job).where(Job.id == job_id).options(*options).with_for_update()
    query = query.execution_options(populate_existing=True)
    job = session.scalar(query)
    if job is None:
        raise no_such_job(job_id)
    return job


def no_such_job(job_id: str) -> NotFound:
    """Return the error for a job that does not exist."""
    return NotFound(f"there is no job {job_id!r}", code="job-not-found")


def check_transition(job: Job, event: Event) -> Step:
    """Return what follows from ``event`` by the transition table. Raises ``Conflict`` if the event is refused."""
    step = next_step(job.phase, event, job.desired)
    if step.phase is None:
        text = _DETAILS[step.code].format(phase=job.phase.value, event=event.value)
        if job.phase is JobPhase.STOPPING and job.desired is Desired.CANCEL:
            text = f"the job is being cancelled; {event.value} comes too late"
        if job.phase is JobPhase.SUCCEEDED and event is Event.RESUME:
            text += f"; a fork continues from a checkpoint: ratchet fork {job.id}"
        raise Conflict(text, code=step.code, phase=job.phase.value)
    return step


def apply(
    session: Session,
    job_id: str,
    event: Event,
    *,
    expected_attempt: int | None = None,
    cause: Cause | None = None,
    reason: JobReason | None = None,
    message: str | None = None,
    data: dict[str, Any] | None = None,
    values: dict[str, Any] | None = None,
) -> Job:
    """Apply ``event`` to the job: write its new phase, desired state and ``values`` (other columns), and add an event row. Return
    the job, whose row stays locked until the transaction ends.

    ``cause``: the cause of the stop, for an event that requests one; None: a request through the API. ``reason`` and ``message``
    replace those of the job, even if they are None; ``CHECKPOINT`` and ``TRAINING`` keep the job's, and the event row of
    ``TRAINING`` shows them. ``data``: more entries for the event row's data. Raises ``NotFound``. Raises ``Conflict`` if the
    event is refused, or if ``expected_attempt`` is not the job's attempt.
    """
    job = lock_job(session, job_id)
    if expected_attempt is not None and job.attempt != expected_attempt:
        raise Conflict(f"attempt {expected_attempt} is not the newest one ({job.attempt})", code="stale-attempt")
    step, before = check_transition(job, event), job.phase
    assert step.phase is not None
    changes = _changes(job, step, step.phase, cause, now_in(session)) | (values or {})
    changes["version"] = Job.version + 1
    shown: str | None = reason
    if event is Event.TRAINING:
        shown, message = job.reason, job.message
    elif event is not Event.CHECKPOINT:  # a checkpoint request does not change why the job is in its phase
        changes |= {"reason": reason, "message": message}
    statement = sa.update(Job).where(Job.id == job_id, Job.phase == before, Job.desired == job.desired)
    if expected_attempt is not None:
        statement = statement.where(Job.attempt == expected_attempt)
    result = session.execute(statement.values(**changes).execution_options(synchronize_session=False))
    assert isinstance(result, CursorResult)
    if result.rowcount != 1:
        raise Conflict("the job changed at the same moment: read it and try again", code="changed-meanwhile")
    session.refresh(job)
    text = message or (f"{before.value} -> {job.phase.value}" if before is not job.phase else event.value)
    facts = {"from": before.value, "to": job.phase.value, "desired": job.desired.value} | (data or {})
    if shown is not None:
        facts["reason"] = shown
    add_event(session, job_id, event, text, attempt=job.attempt or None, data=facts)
    return job


def _changes(job: Job, step: Step, phase: JobPhase, cause: Cause | None, now: datetime) -> dict[str, Any]:
    """Return the values to write when the job moves to ``phase`` by ``step``. ``cause``: see ``apply``."""
    out: dict[str, Any] = {"phase": phase, "updated_at": now}
    if step.desired is not None and step.desired is not job.desired:
        out["desired"] = step.desired
        out["desired_cause"] = None if step.desired is Desired.RUN else (cause or _CAUSES[step.desired])
        out["desired_at"] = None if step.desired is Desired.RUN else (job.desired_at or now)
    if phase.terminal and not job.phase.terminal:
        out |= {"ended_at": now, "not_before": None}
    if phase is not JobPhase.QUEUED:
        out["preempting_since"] = None
    if phase is JobPhase.SUSPENDED:  # a resume must not wait for the rest of a back-off
        out["not_before"] = None
    if job.phase.terminal and not phase.terminal:
        out["ended_at"] = None
    if _is_paused_phase(phase) and job.paused_at is None:
        out["paused_at"] = now
    if not _is_paused_phase(phase) and job.paused_at is not None:
        rested = max(0.0, (now - job.paused_at).total_seconds())
        out |= {"paused_at": None, "paused_seconds": job.paused_seconds + rested}
    if step.reset_budgets:
        out |= {
            "preemptions": 0,
            "failures": 0,
            "attempts_without_progress": 0,
            "retries": 0,
            "running_seconds": 0.0,
            "not_before": None,
        }
    return out


def _is_paused_phase(phase: JobPhase) -> bool:
    """True for phases in which the job is not meant to run: suspended or ended."""
    return phase.terminal or phase is JobPhase.SUSPENDED


def add_event(
    session: Session,
    job_id: str,
    type_: EventType | Event | NoteEventType,
    message: str,
    *,
    attempt: int | None = None,
    data: dict[str, Any] | None = None,
) -> None:
    """Add an entry to the job's history. The caller has locked the job's row. ``attempt``: None if the event concerns none."""
    row = models.Event(job_id=job_id, at=now_in(session), type=type_, attempt=attempt, message=message, data=data or {})
    session.add(row)
