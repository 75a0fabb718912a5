"""Jobs: submit, list, read, change, delete."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from sqlalchemy.orm import Session

from ratchet_contract.access import Scope
from ratchet_contract.api import DeleteResult, JobView, Page, PlanView
from ratchet_contract.api_requests import PatchRequest
from ratchet_contract.phases import JobPhase
from ratchet_contract.spec import JobSpec
from ratchet_service import disk, examples, openapi
from ratchet_service.access import Caller, needs
from ratchet_service.bodies import decode, parse
from ratchet_service.http import BodyDep, Cursor, Limit, ServiceDep, SpecPost, reply, respond
from ratchet_service.idempotency import Reply
from ratchet_service.models import Job
from ratchet_service.ports import SubmissionPorts
from ratchet_service.usecases import adopt as adoption
from ratchet_service.usecases import attempts, deletion, jobs, listing, queue, submit
from ratchet_service.usecases.queries import find_job
from ratchet_service.usecases.spent import of_job
from ratchet_service.usecases.views import job_view

router = APIRouter(tags=["jobs"])


@router.post(
    "/v1/jobs",
    dependencies=[needs(Scope.JOBS_WRITE)],
    status_code=201,
    response_model=JobView,
    responses={200: {"model": PlanView, "description": "With `dry_run`: the plan. Nothing is stored."}},
    openapi_extra=openapi.body(JobSpec, examples.SPEC, required=True, yaml=examples.SPEC_YAML),
    summary="Submit a job",
)
def submit_job(
    service: ServiceDep,
    post: SpecPost,
    caller: Caller,
    dry_run: Annotated[bool, Query(description="Check and plan only.")] = False,
    adopt: Annotated[
        str | None,
        Query(
            max_length=4096,
            description="Directory, on the service's machine, of a run without a service (`Session()` under plain python or "
            "torchrun). Its newest checkpoint is copied, and the job goes on from there; the directory stays as it is.",
        ),
    ] = None,
) -> Response:
    """Validate the spec against this machine, snapshot its code and queue it. JSON or YAML, by content type."""
    poster, data = post
    ports, homes = service.ports, service.settings.paths
    if dry_run:
        return poster.run(lambda: _plan(data, adopt, ports), lambda _session, plan: reply(200, plan))

    def answered(session: Session, job: Job) -> Reply:
        return reply(201, job_view(session, job), Location=f"/v1/jobs/{job.id}", ETag=jobs.etag(job))

    if adopt is None:
        answer = poster.run(
            lambda: submit.prepare(data, ports),
            lambda session, prepared: answered(session, submit.store(session, prepared, caller.owner)),
        )
    else:
        answer = poster.run(
            lambda: adoption.prepare(data, adopt, ports, homes),
            lambda session, prepared: answered(session, adoption.store(session, prepared, caller.owner, homes)),
        )
    ports.wake()
    return answer


def _plan(data: Any, adopt: str | None, ports: SubmissionPorts) -> PlanView:
    plan = submit.dry_run(data, ports)
    if adopt is None:
        return plan
    return plan.model_copy(update={"warnings": [*plan.warnings, *adoption.check(data, adopt, ports)]})


@router.get("/v1/jobs", dependencies=[needs(Scope.JOBS_READ)], summary="List jobs")
def list_jobs(
    service: ServiceDep,
    phase: Annotated[list[JobPhase] | None, Query(description="Any of these phases.")] = None,
    label: Annotated[
        list[Annotated[str, Query(max_length=400)]] | None,
        Query(max_length=64, description="key=value; all of them must hold."),
    ] = None,
    name: Annotated[str | None, Query(max_length=100, description="The whole name.")] = None,
    owner: Annotated[str | None, Query(max_length=100, description="Whose jobs.")] = None,
    sort: Annotated[listing.Sort, Query(description="`-` means descending.")] = "-created",
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[JobView]:
    """One page. Jobs submitted while you page neither repeat nor hide those that were there before."""
    labels = tuple(listing.parse_label(text) for text in label or ())
    wanted = listing.JobFilter(tuple(phase or ()), labels, name, sort, owner)
    with service.database.read() as session:
        return listing.list_jobs(session, wanted, limit, cursor)


@router.get("/v1/jobs/{job_id}", dependencies=[needs(Scope.JOBS_READ)], summary="Read a job")
def get_job(service: ServiceDep, job_id: str, response: Response) -> JobView:
    """The ETag changes with phase, wish, labels and priority, not with progress.

    While the disk of the database is full, a job that has not ended says so as its reason, `disk-full`: its row cannot.
    """
    with service.database.read() as session:
        job = find_job(session, job_id)
        response.headers["ETag"] = jobs.etag(job)
        view = job_view(session, job)
        spent = of_job(session, job)
        place = queue.place(session, job)
    homes = service.settings.paths
    work = homes.job(job_id).work
    more: dict[str, Any] = {
        "environment": attempts.newest_environment(homes, job_id, view.attempt),
        "goodput": spent,
        "position": place.position,
        "ahead_at_least": place.at_least,
        "work_dir": str(work) if work.is_dir() else None,
    }
    full = None if job.phase.terminal else disk.without_room(service.database)
    if full is not None:
        more.update(reason="disk-full", message=full.detail)
    return view.model_copy(update=more)


@router.patch(
    "/v1/jobs/{job_id}",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    response_model=JobView,
    openapi_extra=openapi.body(PatchRequest, examples.PATCH, required=True),
    summary="Change labels and priority",
)
def patch_job(
    service: ServiceDep,
    job_id: str,
    body: BodyDep,
    if_match: Annotated[str | None, Header(description=openapi.IF_MATCH)] = None,
) -> Response:
    """Labels are merged, null removes one. The spec stays as it was submitted."""
    request = parse(PatchRequest, decode(body))
    with service.database.write() as session:
        job = jobs.patch(session, job_id, request, if_match)
        answer = reply(200, job_view(session, job), ETag=jobs.etag(job))
    service.ports.wake()
    return respond(answer)


@router.delete(
    "/v1/jobs/{job_id}", dependencies=[needs(Scope.JOBS_WRITE, own_job=True)], summary="Delete a job that has ended"
)
def delete_job(
    service: ServiceDep,
    job_id: str,
    caller: Caller,
    keep_checkpoints: Annotated[bool, Query(description="Leave its checkpoints on the disk.")] = False,
    outputs: Annotated[
        bool,
        Query(
            description="Also remove what it left in its working directory; now, of a job that was deleted without, for its "
            "owner or an admin."
        ),
    ] = False,
    if_match: Annotated[str | None, Header(description=openapi.IF_MATCH)] = None,
) -> DeleteResult:
    """Its history, logs and, unless kept, its checkpoints go. There is no way back. What it left in its working directory stays
    unless `outputs` is true: the answer says where."""
    return deletion.delete(
        service.database,
        job_id,
        keep_checkpoints=keep_checkpoints,
        outputs=outputs,
        if_match=if_match,
        homes=service.settings.paths,
        caller=caller,
    )
