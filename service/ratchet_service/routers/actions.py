"""What may be asked of a job: suspend, resume, cancel, preempt, checkpoint, fork."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, ConfigDict
from sqlalchemy.orm import Session

from ratchet_contract.access import Scope
from ratchet_contract.api import JobView
from ratchet_contract.api_requests import ForkRequest, ResumeRequest
from ratchet_contract.phases import Desired, Event
from ratchet_service import examples, openapi
from ratchet_service.access import Caller, needs
from ratchet_service.bodies import parse
from ratchet_service.http import JsonPost, Poster, Service, ServiceDep, SpecPost, reply
from ratchet_service.idempotency import Reply
from ratchet_service.models import Job
from ratchet_service.usecases import actions, fork, jobs
from ratchet_service.usecases.views import job_view

router = APIRouter(tags=["actions"])
_UNDER_WAY: dict[int | str, dict[str, Any]] = {
    202: {"model": JobView, "description": "Wanted, and under way."},
    200: {"description": "Reached at once, or already."},
}


class Nothing(BaseModel):
    """The body of an action without parameters: none, or an empty object."""

    model_config = ConfigDict(extra="forbid")


def _run(service: Service, poster: Poster, change: Callable[[Session], Job], *, under_way: bool = False) -> Response:
    def effect(session: Session, _: None) -> Reply:
        return _acted(session, change(session), under_way=under_way)

    answer = poster.run(lambda: None, effect)
    service.ports.wake()
    return answer


def _acted(session: Session, job: Job, *, under_way: bool = False) -> Reply:
    status = 202 if under_way or job.desired is not Desired.RUN else 200
    return reply(status, job_view(session, job), ETag=jobs.etag(job))


def _plain(service: Service, post: tuple[Poster, Any], job_id: str, event: Event) -> Response:
    poster, data = post
    parse(Nothing, data)
    return _run(service, poster, lambda session: actions.act(session, job_id, event))


@router.post(
    "/v1/jobs/{job_id}/suspend",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    response_model=JobView,
    responses=_UNDER_WAY,
    openapi_extra=openapi.NO_BODY,
    summary="Save and release",
)
def suspend(service: ServiceDep, post: JsonPost, job_id: str) -> Response:
    """The group saves at a step that all ranks agree on and ends; the job waits for `resume`."""
    return _plain(service, post, job_id, Event.SUSPEND)


@router.post(
    "/v1/jobs/{job_id}/cancel",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    response_model=JobView,
    responses=_UNDER_WAY,
    openapi_extra=openapi.NO_BODY,
    summary="End a job",
)
def cancel(service: ServiceDep, post: JsonPost, job_id: str) -> Response:
    """The group ends; checkpoints stay, and the job may be resumed later."""
    return _plain(service, post, job_id, Event.CANCEL)


@router.post(
    "/v1/jobs/{job_id}/preempt",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    response_model=JobView,
    responses=_UNDER_WAY,
    openapi_extra=openapi.NO_BODY,
    summary="Save, stop and queue again",
)
def preempt(service: ServiceDep, post: JsonPost, job_id: str) -> Response:
    """As a machine would be taken away: it counts against `max_preemptions`."""
    return _plain(service, post, job_id, Event.PREEMPT)


@router.post(
    "/v1/jobs/{job_id}/checkpoint",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    status_code=202,
    response_model=JobView,
    openapi_extra=openapi.NO_BODY,
    summary="Save now",
)
def checkpoint(service: ServiceDep, post: JsonPost, job_id: str) -> Response:
    """The running group saves at its next agreed step and goes on; look for the event `checkpoint`."""
    poster, data = post
    parse(Nothing, data)
    return _run(service, poster, lambda session: actions.request_checkpoint(session, job_id), under_way=True)


@router.post(
    "/v1/jobs/{job_id}/resume",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    response_model=JobView,
    responses=_UNDER_WAY,
    openapi_extra=openapi.body(ResumeRequest, examples.RESUME),
    summary="Go on",
)
def resume(service: ServiceDep, post: JsonPost, job_id: str) -> Response:
    """A suspended, failed or cancelled job is queued again; with `from_step` from an older checkpoint of its lineage.

    `world` gives it another number of ranks, `hook` another hook, wrapper or parameters, which is not exact: `on_hook_mismatch`
    says what becomes of the hook's state. `code` takes a new snapshot of its code, which is not exact either, unless no file has
    changed. All are kept in the spec, and all need a job without a running attempt.
    """
    poster, data = post
    request = parse(ResumeRequest, data)
    ports, homes = service.ports, service.settings.paths

    def prepare() -> actions.PreparedResume:
        return actions.prepare_resume(service.database, job_id, request, ports)

    def effect(session: Session, prepared: actions.PreparedResume) -> Reply:
        return _acted(session, actions.resume(session, job_id, prepared, ports, homes))

    answer = poster.run(prepare, effect)
    ports.wake()
    return answer


@router.post(
    "/v1/jobs/{job_id}/fork",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    status_code=201,
    response_model=JobView,
    openapi_extra=openapi.body(ForkRequest, examples.FORK),
    summary="New job from a checkpoint",
)
def fork_job(service: ServiceDep, post: SpecPost, caller: Caller, job_id: str) -> Response:
    """The parent's spec with `spec` merged over it (RFC 7386; another hook replaces it whole). The source is pinned.

    The code is the parent's snapshot; name `code` in `spec`, be it the same path, to take a new one.
    """
    poster, data = post
    request = parse(ForkRequest, data)

    def prepare() -> fork.PreparedFork:
        return fork.prepare(service.database, job_id, request, service.ports, service.settings.paths)

    def effect(session: Session, prepared: fork.PreparedFork) -> Reply:
        job = fork.store(session, prepared, caller.owner, service.settings.paths)
        return reply(201, job_view(session, job), Location=f"/v1/jobs/{job.id}", ETag=jobs.etag(job))

    answer = poster.run(prepare, effect)
    service.ports.wake()
    return answer
