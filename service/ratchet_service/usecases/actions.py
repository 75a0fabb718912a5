"""suspend, resume, cancel, preempt, checkpoint: what the API may ask of a job in each phase, by the transition table."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy.orm import Session

from ratchet_contract.api import Warning_
from ratchet_contract.api_requests import ResumeRequest
from ratchet_contract.errors import Conflict, NotFound
from ratchet_contract.paths import HomePaths
from ratchet_contract.phases import Event
from ratchet_contract.plural import counted
from ratchet_contract.spec import JobSpec, Resolved
from ratchet_service import quotas, unmanaged
from ratchet_service.database import Database
from ratchet_service.models import Attempt, Job
from ratchet_service.ports import SubmissionPorts
from ratchet_service.transitions import add_event, apply, check
from ratchet_service.usecases import worlds
from ratchet_service.usecases.queries import committed_in_lineage, find_job, hold_job


def act(session: Session, job_id: str, event: Event) -> Job:
    """suspend, cancel or preempt. Asking again for what is under way, or reached, changes nothing and is no error."""
    job = hold_job(session, job_id)
    if _already(job, event):
        return job
    return apply(session, job_id, event)


def request_checkpoint(session: Session, job_id: str) -> Job:
    """The running group saves at its next agreed step. Raises ``Conflict`` where no group runs, and for a script without a
    Session (``checkpoint-needs-session``)."""
    job = hold_job(session, job_id)
    check(job, Event.CHECKPOINT)
    attempt, script = session.get(Attempt, (job.id, job.epoch)), job.spec.get("script")
    if script and attempt is not None and _makes_no_session(job, attempt):
        raise unmanaged.refuse_request(script[0])
    number = job.checkpoint_request + 1
    values, data = {"checkpoint_request": number}, {"request": number}
    return apply(session, job_id, Event.CHECKPOINT, message="a checkpoint was asked for", values=values, data=data)


def _makes_no_session(job: Job, attempt: Attempt) -> bool:
    """Of a script that may make one in a module that it imports, the attempt reports nothing until then."""
    if attempt.resume_report is None:
        return unmanaged.WARNING in {warning["code"] for warning in job.warnings}
    return unmanaged.reported(attempt.resume_report)


@dataclass(frozen=True)
class PreparedResume:
    """``spec``: what was checked, None where nothing was; ``warnings``: of its hook; ``code``: the code that was asked for."""

    request: ResumeRequest
    spec: JobSpec | None
    warnings: list[Warning_]
    code: worlds.NewCode | None = None


def prepare_resume(database: Database, job_id: str, request: ResumeRequest, ports: SubmissionPorts) -> PreparedResume:
    """Another hook and other code are checked as at submission; no transaction is open meanwhile. Raises ``SpecError``,
    ``NotFound``, ``Conflict`` for a job that cannot be resumed."""
    with database.read() as session:
        job = find_job(session, job_id)
    spec = worlds.wanted(job, request)
    if job.phase.active:  # to be refused; should its attempt end before that, nothing was checked
        return PreparedResume(request, None, [])
    if request.code is None:
        return PreparedResume(request, spec, worlds.check_hook(job, spec, ports))
    check(job, Event.RESUME)  # before anything is copied
    code = worlds.take_code(job, spec, ports)
    return PreparedResume(request, worlds.wanted(job, request, code), code.hook_warnings, code)


def resume(session: Session, job_id: str, prepared: PreparedResume, ports: SubmissionPorts, homes: HomePaths) -> Job:
    """Let a job go on, optionally from an older checkpoint of its lineage, with another number of ranks, another hook, other code
    or another ``policy.on_hook_mismatch``; all of these stay the job's.

    Raises ``Conflict``: ``from-step-needs-stop``, ``code-needs-stop``, ``hook-needs-stop``, ``world-needs-stop`` or
    ``policy-needs-stop`` while an attempt may be alive, ``world-size-mismatch``, ``hook-mismatch`` or ``code-mismatch`` where the
    policy or strict determinism forbids to carry the checkpoint over, ``changed-meanwhile``, ``quota-exceeded``; ``NotFound`` for
    a step without a checkpoint; ``SpecError`` for more ranks than the machine can run, or the owner's quota has.
    """
    job, request = hold_job(session, job_id), prepared.request
    spec = worlds.wanted(job, request, prepared.code)
    code = prepared.code if prepared.code is not None and prepared.code.is_new(job) else None
    unchecked = request.code is not None and prepared.code is None
    if request.from_step is None and spec is None and code is None and not unchecked:
        if _already(job, Event.RESUME):
            return job
        _admit(session, job, None)
        return apply(session, job_id, Event.RESUME)
    check(job, Event.RESUME)
    if job.phase.active:
        raise _needs_stop(job, request)
    if unchecked or spec != prepared.spec:
        raise Conflict("the job changed while its new spec was checked: try again", code="changed-meanwhile")
    source, data = job.resume_from, {}
    if request.from_step is not None:
        source, data = _checkpoint_at(session, job, request.from_step), {"from_step": request.from_step}
    start = worlds.next_start(session, job, source, homes)
    digest = code.digest if code is not None else job.resolved.get("code_digest")
    if start is not None and start.parent == homes.job(job_id).adopted.checkpoints:
        digest = None  # a run without a service knows no snapshot of its code
    for problem in worlds.mismatches(spec or _spec(job), start, digest) if start is not None else ():
        raise Conflict(problem.detail, code=problem.code, phase=job.phase.value)
    change = None
    if spec is not None or code is not None:
        change = worlds.change(job, spec or _spec(job), ports, prepared.warnings, code)
    _admit(session, job, change)
    for type_, text, facts in change.events if change is not None else ():
        add_event(session, job_id, type_, text, epoch=job.epoch or None, data=facts)
    values = {"resume_from": source, "not_before": None} | (change.columns if change is not None else {})
    return apply(session, job_id, Event.RESUME, values=values, data=data)


def _spec(job: Job) -> JobSpec:
    return JobSpec.model_validate(job.spec)


def _admit(session: Session, job: Job, change: worlds.Change | None) -> None:
    """What had ended counts as a job more; another number of ranks must fit into the quota."""
    if change is None and not job.phase.terminal:
        return
    spec = _spec(job) if change is None else change.spec
    resolved = Resolved.model_validate(job.resolved if change is None else change.columns.get("resolved", job.resolved))
    quotas.admit(session, job.owner, spec, resolved, more=job.phase.terminal)


def _needs_stop(job: Job, request: ResumeRequest) -> Conflict:
    if request.from_step is not None:
        code, what = "from-step-needs-stop", f"from step {request.from_step}"
    elif request.code is not None:
        code, what = "code-needs-stop", "with other code"
    elif request.hook is not None:
        code, what = "hook-needs-stop", "with another hook"
    elif request.world is not None:
        code, what = "world-needs-stop", f"with {counted(request.world.ranks_per_node, 'rank')}"
    else:
        code, what = "policy-needs-stop", f"with on_hook_mismatch {request.on_hook_mismatch}"
    return Conflict(f"the job is {job.phase.value}: suspend it first, then resume it {what}", code=code)


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
