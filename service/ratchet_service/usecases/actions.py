"""suspend, resume, cancel, preempt, checkpoint: what the API may ask of a job in each phase, by the transition table."""

from __future__ import annotations

from typing import Any

from sqlalchemy.orm import Session

from ratchet_contract.api import ResumeRequest
from ratchet_contract.errors import Conflict, FieldProblem, NotFound, SpecError
from ratchet_contract.phases import Event
from ratchet_service.models import Job
from ratchet_service.transitions import apply, check
from ratchet_service.usecases.queries import committed_in_lineage, hold_job


def act(session: Session, job_id: str, event: Event) -> Job:
    """suspend, cancel or preempt. Asking again for what is under way, or reached, changes nothing and is no error."""
    job = hold_job(session, job_id)
    if _already(job, event):
        return job
    return apply(session, job_id, event)


def request_checkpoint(session: Session, job_id: str) -> Job:
    """The running group saves at its next agreed step. Raises ``Conflict`` where no group runs."""
    job = hold_job(session, job_id)
    number = job.checkpoint_request + 1
    values, data = {"checkpoint_request": number}, {"request": number}
    return apply(session, job_id, Event.CHECKPOINT, message="a checkpoint was asked for", values=values, data=data)


def resume(session: Session, job_id: str, request: ResumeRequest) -> Job:
    """Let a job go on, optionally from an older checkpoint of its lineage.

    Raises ``Conflict`` (``from-step-needs-stop``) for ``from_step`` while an attempt may be alive, ``NotFound`` for a step
    without a checkpoint.
    """
    job = hold_job(session, job_id)
    if request.from_step is None:
        return job if _already(job, Event.RESUME) else apply(session, job_id, Event.RESUME)
    check(job, Event.RESUME)
    if job.phase.active:
        raise Conflict(
            f"the job is {job.phase.value}: suspend it first, then resume it from step {request.from_step}",
            code="from-step-needs-stop",
        )
    source = _checkpoint_at(session, job, request.from_step)
    return apply(session, job_id, Event.RESUME, values={"resume_from": source}, data={"from_step": request.from_step})


def refuse_other_world(data: Any) -> None:
    """``resume`` with another world size is for later: say so, rather than "unknown key"."""
    if not isinstance(data, dict):
        return
    for key in ("world", "world_size", "ranks_per_node", "nodes"):
        if key in data:
            text = "going on with another number of ranks is not available yet; leave it out to resume with the same number"
            problem = FieldProblem(pointer=f"/{key}", code="not-available", detail=text)
            raise SpecError(f"/{key}: {text}", code="not-available", errors=[problem])


def _already(job: Job, event: Event) -> bool:
    step = check(job, event)
    return step.phase is job.phase and step.desired in (None, job.desired) and not step.fresh_budgets


def _checkpoint_at(session: Session, job: Job, step: int) -> dict[str, int]:
    committed = committed_in_lineage(session, job)
    found = next((row for row in committed if row.step == step), None)
    if found is None:
        steps = ", ".join(str(row.step) for row in committed[:20]) or "none"
        raise NotFound(
            f"job {job.id} has no committed checkpoint of step {step} in its lineage; there are: {steps}",
            code="checkpoint-not-found",
        )
    return {"step": found.step, "epoch": found.epoch}
