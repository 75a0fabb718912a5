"""Routes for the actions on a job: suspend, resume, cancel, preempt, checkpoint, fork."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response
from sqlalchemy.orm import Session

from ratchet_contract.api.requests import ForkRequest, ResumeRequest
from ratchet_contract.api.roles import Scope
from ratchet_contract.api.views import JobView
from ratchet_contract.phases import Desired, Event
from ratchet_service.api import openapi
from ratchet_service.api.authentication import Caller, needs
from ratchet_service.api.dependencies import JsonPost, Poster, Service, ServiceDep, SpecPost, reply
from ratchet_service.api.idempotency import Reply
from ratchet_service.api.request_body import Nothing, parse
from ratchet_service.db import queries
from ratchet_service.db.models import Job
from ratchet_service.usecases import fork, job_actions
from ratchet_service.usecases.views import job_view

router = APIRouter(tags=["actions"])
_STOP_RESPONSES: dict[int | str, dict[str, Any]] = {
    202: {"model": JobView, "description": "Accepted, in progress."},
    200: {"description": "Done at once, or already before."},
}


def _run_change(
    service: Service, poster: Poster, change: Callable[[Session], Job], *, accepted: bool = False
) -> Response:
    """Run ``change`` in a write transaction, wake the reconciler, and return the job. ``accepted``: the status is 202."""

    def effect(session: Session, _: None) -> Reply:
        return _job_reply(session, change(session), accepted=accepted)

    answer = poster.run(lambda: None, effect)
    service.submission.wake()
    return answer


def _job_reply(session: Session, job: Job, *, accepted: bool = False) -> Reply:
    """Return the job as an answer, with its ETag. The status is 202 if ``accepted`` or the desired state is not run."""
    status = 202 if accepted or job.desired is not Desired.RUN else 200
    return reply(status, job_view(session, job), ETag=queries.etag(job))


def _run_event(service: Service, post: tuple[Poster, Any], job_id: str, event: Event) -> Response:
    """Apply ``event`` to the job, and return the job as the response. Raises ``SpecError`` if the body has a parameter."""
    poster, data = post
    parse(Nothing, data)
    return _run_change(service, poster, lambda session: job_actions.apply_action(session, job_id, event))


@router.post(
    "/v1/jobs/{job_id}/suspend",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    response_model=JobView,
    responses=_STOP_RESPONSES,
    openapi_extra=openapi.NO_BODY,
    summary="Save and release",
)
def suspend(service: ServiceDep, post: JsonPost, job_id: str) -> Response:
    """The group saves, if it can, at a step that all ranks agree on, and ends; the job then waits for `resume`."""
    return _run_event(service, post, job_id, Event.SUSPEND)


@router.post(
    "/v1/jobs/{job_id}/cancel",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    response_model=JobView,
    responses=_STOP_RESPONSES,
    openapi_extra=openapi.NO_BODY,
    summary="End a job",
)
def cancel(service: ServiceDep, post: JsonPost, job_id: str) -> Response:
    """The group ends; the checkpoints stay, and the job may be resumed later."""
    return _run_event(service, post, job_id, Event.CANCEL)


@router.post(
    "/v1/jobs/{job_id}/preempt",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    response_model=JobView,
    responses=_STOP_RESPONSES,
    openapi_extra=openapi.NO_BODY,
    summary="Save, stop and queue again",
)
def preempt(service: ServiceDep, post: JsonPost, job_id: str) -> Response:
    """The group saves, if it can, and ends. The job is queued again, as if its machine were taken away: it counts against
    `max_preemptions`."""
    return _run_event(service, post, job_id, Event.PREEMPT)


@router.post(
    "/v1/jobs/{job_id}/checkpoint",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    status_code=202,
    response_model=JobView,
    openapi_extra=openapi.NO_BODY,
    summary="Save now",
)
def checkpoint(service: ServiceDep, post: JsonPost, job_id: str) -> Response:
    """The running group saves at its next agreed step and continues; the event `checkpoint` reports the save."""
    poster, data = post
    parse(Nothing, data)
    return _run_change(service, poster, lambda session: job_actions.request_checkpoint(session, job_id), accepted=True)


@router.post(
    "/v1/jobs/{job_id}/resume",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    response_model=JobView,
    responses=_STOP_RESPONSES,
    openapi_extra=openapi.body(ResumeRequest, openapi.RESUME),
    summary="Go on",
)
def resume(service: ServiceDep, post: JsonPost, job_id: str) -> Response:
    """Queues a suspended, failed or cancelled job again. With `from_step`, it continues from the checkpoint of that step in its
    lineage.

    `world` gives it another number of ranks. `hook` gives it another hook, wrapper or parameters; such a resume is not exact,
    unless results do not depend on the change. `on_hook_mismatch` decides what happens to the hook's state. `code` takes a new
    snapshot of its code; such a resume is not exact either, unless no file has changed. All changes are stored in the spec, and
    all require a job without a running attempt.
    """
    poster, data = post
    request = parse(ResumeRequest, data)
    submission, homes = service.submission, service.settings.paths

    def prepare() -> job_actions.PreparedResume:
        return job_actions.prepare_resume(service.database, job_id, request, submission)

    def effect(session: Session, prepared: job_actions.PreparedResume) -> Reply:
        return _job_reply(session, job_actions.resume(session, job_id, prepared, submission, homes))

    answer = poster.run(prepare, effect)
    submission.wake()
    return answer


@router.post(
    "/v1/jobs/{job_id}/fork",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    status_code=201,
    response_model=JobView,
    openapi_extra=openapi.body(ForkRequest, openapi.FORK),
    summary="New job from a checkpoint",
)
def fork_job(service: ServiceDep, post: SpecPost, caller: Caller, job_id: str) -> Response:
    """Creates a new job with the parent's spec and `spec` merged over it (RFC 7396; another hook replaces the parent's whole
    hook). It starts from a committed checkpoint of the parent. If the parent is a fork without a checkpoint of its own, the
    new job starts from the checkpoint that the parent was forked from. That checkpoint is pinned.

    The code is the parent's snapshot; set `code` in `spec`, even to the same path, to take a new one.
    """
    poster, data = post
    request = parse(ForkRequest, data)

    def prepare() -> fork.PreparedFork:
        return fork.prepare(service.database, job_id, request, service.submission, service.settings.paths)

    def effect(session: Session, prepared: fork.PreparedFork) -> Reply:
        job = fork.store(session, prepared, caller.owner, service.settings.paths)
        return reply(201, job_view(session, job), Location=f"/v1/jobs/{job.id}", ETag=queries.etag(job))

    answer = poster.run(prepare, effect)
    service.submission.wake()
    return answer
