"""Requests to suspend, resume, cancel, preempt or checkpoint a job. They are stored here; reconciler and agents act on
attempts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy.orm import Session

from ratchet_contract.api.audit import AuditAction
from ratchet_contract.api.requests import ResumeRequest
from ratchet_contract.api.views import Warning_
from ratchet_contract.errors import Conflict, NotFound
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Event
from ratchet_contract.plural import pluralize
from ratchet_contract.spec.job import JobSpec, Resolved
from ratchet_service.checkpoints.lineage import committed_in_lineage
from ratchet_service.db import audit
from ratchet_service.db.engine import Database
from ratchet_service.db.models import Attempt, Job
from ratchet_service.db.queries import find_job, find_job_for_update
from ratchet_service.db.transitions import add_event, apply, check_transition
from ratchet_service.lifecycle import unmanaged_script
from ratchet_service.scheduling import quotas
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_service.usecases import resize


def apply_action(session: Session, job_id: str, event: Event) -> Job:
    """Suspend, cancel or preempt a job, according to ``event``, and return its row. Without an active attempt this takes effect
    at once; otherwise the request is stored. A request already in effect changes nothing. Neither does a preemption of a job that
    is already being stopped. Raise ``NotFound``, or ``Conflict`` if the phase does not allow the action."""
    job = find_job_for_update(session, job_id)
    if _is_already_applied(job, event):
        return job
    return _apply_recorded(session, job, event, {})


def _apply_recorded(session: Session, job: Job, event: Event, facts: dict[str, Any], **arguments: Any) -> Job:
    """Apply a requested ``event`` with ``arguments`` of ``apply``, and record it in the audit log with the change of the phase
    and ``facts``."""
    before = {"phase": job.phase.value, "desired": job.desired.value}
    job = apply(session, job.id, event, **arguments)
    changes = audit.differences(before, {"phase": job.phase.value, "desired": job.desired.value})
    audit.record(session, AuditAction(event.value), "job", job.id, job.owner, changes | facts)
    return job


def request_checkpoint(session: Session, job_id: str) -> Job:
    """Request a checkpoint soon, without waiting for it, and return the job's row. Raise ``NotFound``, or ``Conflict`` if the
    phase does not allow that or the script is reported to have no Session."""
    job = find_job_for_update(session, job_id)
    check_transition(job, Event.CHECKPOINT)
    attempt, script = session.get(Attempt, (job.id, job.attempt)), job.spec.get("script")
    if script and attempt is not None and _makes_no_session(job, attempt):
        raise unmanaged_script.checkpoint_request_conflict(script[0])
    number = job.checkpoint_request + 1
    values, data = {"checkpoint_request": number}, {"request": number}
    message = "a checkpoint was requested"
    return _apply_recorded(session, job, Event.CHECKPOINT, data, message=message, values=values, data=data)


def _makes_no_session(job: Job, attempt: Attempt) -> bool:
    """True if the attempt's resume report, or before it a warning of the job, says that the script has made no Session."""
    if attempt.resume_report is None:
        return unmanaged_script.WARNING in {warning["code"] for warning in job.warnings}
    return unmanaged_script.is_reported_unmanaged(attempt.resume_report)


@dataclass(frozen=True)
class PreparedResume:
    """A resume request after its check. ``spec``: the changed spec; None: no change is requested. ``code``: the requested code;
    None: no code is requested. Both are also None if an attempt may be alive, since nothing is checked then. ``warnings``: about
    the hook."""

    request: ResumeRequest
    spec: JobSpec | None
    warnings: list[Warning_]
    code: resize.NewCode | None = None


def prepare_resume(
    database: Database, job_id: str, request: ResumeRequest, submission: LocalSubmission
) -> PreparedResume:
    """Check a changed hook and requested code, and take a snapshot of the code, unless an attempt may be alive. Raises as
    ``submit.prepare`` does, and ``NotFound`` or ``Conflict``."""
    with database.read() as session:
        job = find_job(session, job_id)
    spec = resize.requested_spec(job, request)
    if job.phase.active:  # ``resume`` refuses this; if the attempt ends before, nothing has been checked
        return PreparedResume(request, None, [])
    if request.code is None:
        return PreparedResume(request, spec, resize.check_hook(job, spec, submission))
    check_transition(job, Event.RESUME)  # before anything is copied
    code = resize.prepare_code(job, spec, submission)
    return PreparedResume(request, resize.requested_spec(job, request, code), code.hook_warnings, code)


def resume(
    session: Session, job_id: str, prepared: PreparedResume, submission: LocalSubmission, homes: HomePaths
) -> Job:
    """Queue a job again and return its row. If no change is requested, a job that is queued or runs already stays as it is. The
    job may continue from an older checkpoint, or with permanent changes such as another hook. A failed or cancelled job gets
    fresh budgets.

    Raise ``Conflict`` if the phase, the checkpoint or the quota does not allow that. Raise ``Conflict`` also if the changed spec
    is not the one that ``prepare_resume`` checked. Raise ``NotFound`` or ``SpecError`` for the request.
    """
    job, request = find_job_for_update(session, job_id), prepared.request
    spec = resize.requested_spec(job, request, prepared.code)
    code = prepared.code if prepared.code is not None and prepared.code.is_new(job) else None
    unchecked = request.code is not None and prepared.code is None
    if request.from_step is None and spec is None and code is None and not unchecked:
        if _is_already_applied(job, Event.RESUME):
            return job
        _check_quota(session, job, None)
        return _apply_recorded(session, job, Event.RESUME, {})
    check_transition(job, Event.RESUME)
    if job.phase.active:
        raise _needs_stop_error(job, request)
    if unchecked or spec != prepared.spec:
        raise Conflict("the job changed while its new spec was checked: try again", code="changed-meanwhile")
    source, data = job.resume_from, {}
    if request.from_step is not None:
        source, data = _checkpoint_at(session, job, request.from_step), {"from_step": request.from_step}
    start = resize.next_start(session, job, source, homes)
    digest = code.digest if code is not None else job.resolved.get("code_digest")
    if start is not None and start.parent == homes.job(job_id).adopted.checkpoints:
        digest = None  # a run without a service has no snapshot of its code
    for problem in resize.mismatches(spec or _job_spec(job), start, digest) if start is not None else ():
        raise Conflict(problem.detail, code=problem.code, phase=job.phase.value)
    change = None
    if spec is not None or code is not None:
        change = resize.make_change(job, spec or _job_spec(job), submission, prepared.warnings, code)
    _check_quota(session, job, change)
    events = change.events if change is not None else []
    for type_, text, facts in events:
        add_event(session, job_id, type_, text, attempt=job.attempt or None, data=facts)
    values = {"resume_from": source, "not_before": None} | (change.columns if change is not None else {})
    recorded = data | ({"changes": [text for _, text, _ in events]} if events else {})
    return _apply_recorded(session, job, Event.RESUME, recorded, values=values, data=data)


def _job_spec(job: Job) -> JobSpec:
    return JobSpec.model_validate(job.spec)


def _check_quota(session: Session, job: Job, change: resize.Change | None) -> None:
    """Check the owner's quota if the job had ended or gets a change; otherwise do nothing. Raise ``Conflict`` or
    ``SpecError``."""
    if change is None and not job.phase.terminal:
        return
    spec = _job_spec(job) if change is None else change.spec
    resolved = Resolved.model_validate(job.resolved if change is None else change.columns.get("resolved", job.resolved))
    quotas.admit(session, job.owner, spec, resolved, is_new=job.phase.terminal)


def _needs_stop_error(job: Job, request: ResumeRequest) -> Conflict:
    """Return (not raise) the error for a change that is possible only while no attempt of the job is active."""
    if request.from_step is not None:
        code, what = "from-step-needs-stop", f"from step {request.from_step}"
    elif request.code is not None:
        code, what = "code-needs-stop", "with other code"
    elif request.hook is not None:
        code, what = "hook-needs-stop", "with another hook"
    elif request.world is not None:
        code, what = "world-needs-stop", f"with {pluralize(request.world.ranks_per_node, 'rank')}"
    else:
        code, what = "policy-needs-stop", f"with on_hook_mismatch {request.on_hook_mismatch}"
    return Conflict(f"the job is {job.phase.value}: suspend it first, then resume it {what}", code=code)


def _is_already_applied(job: Job, event: Event) -> bool:
    """True if ``event`` would change neither phase, desired state nor budgets. Raise ``Conflict`` if the phase forbids it."""
    step = check_transition(job, event)
    return step.phase is job.phase and step.desired in (None, job.desired) and not step.reset_budgets


def _checkpoint_at(session: Session, job: Job, step: int) -> dict[str, int]:
    """Return step and attempt of the job's own checkpoint of ``step`` from which its next attempt could start. Raise
    ``NotFound``."""
    committed = committed_in_lineage(session, job)
    found = next((row for row in committed if row.step == step), None)
    if found is None:
        steps = ", ".join(str(row.step) for row in committed[:20]) or "none"
        raise NotFound(
            f"job {job.id} has no committed checkpoint of step {step} in its lineage; it has: {steps}",
            code="checkpoint-not-found",
        )
    return {"step": found.step, "attempt": found.attempt}
