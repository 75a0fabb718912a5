"""Jobs: submit, list, read, change, delete."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Response
from sqlalchemy.orm import Session

from ratchet_contract.api.requests import PatchRequest
from ratchet_contract.api.roles import Scope
from ratchet_contract.api.views import DeleteResult, JobView, Page, PlanView
from ratchet_contract.phases import JobPhase, Reason
from ratchet_contract.spec.job import JobSpec
from ratchet_service.api import openapi
from ratchet_service.api.authentication import Caller, needs
from ratchet_service.api.dependencies import BodyDep, Cursor, Limit, ServiceDep, SpecPost, reply, respond
from ratchet_service.api.idempotency import Reply
from ratchet_service.api.request_body import decode, parse
from ratchet_service.db import queries
from ratchet_service.db.models import Job
from ratchet_service.db.queries import find_job
from ratchet_service.job_files import delete_job as deletion
from ratchet_service.observability import disk_space
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_service.usecases import adopt_run as adoption
from ratchet_service.usecases import job_history, queue, submit, update_job
from ratchet_service.usecases import list_jobs as listing
from ratchet_service.usecases.goodput import job_goodputs
from ratchet_service.usecases.views import job_view

router = APIRouter(tags=["jobs"])


@router.post(
    "/v1/jobs",
    dependencies=[needs(Scope.JOBS_WRITE)],
    status_code=201,
    response_model=JobView,
    responses={200: {"model": PlanView, "description": "With `dry_run`: the plan. Nothing is stored."}},
    openapi_extra=openapi.body(JobSpec, openapi.SPEC, required=True, yaml=openapi.SPEC_YAML),
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
            "torchrun). Its newest checkpoint is copied, and the job continues from it; the directory is not changed.",
        ),
    ] = None,
) -> Response:
    """Validates the spec against this machine, takes a snapshot of its code and queues the job. JSON or YAML, by content type."""
    poster, data = post
    submission, homes = service.submission, service.settings.paths
    if dry_run:
        return poster.run(lambda: _plan(data, adopt, submission), lambda _session, plan: reply(200, plan))

    def job_reply(session: Session, job: Job) -> Reply:
        return reply(201, job_view(session, job), Location=f"/v1/jobs/{job.id}", ETag=queries.etag(job))

    if adopt is None:
        answer = poster.run(
            lambda: submit.prepare(data, submission),
            lambda session, prepared: job_reply(session, submit.store(session, prepared, caller.owner)),
        )
    else:
        with ExitStack() as until_stored:
            answer = poster.run(
                lambda: adoption.prepare(data, adopt, submission, homes, until_stored),
                lambda session, prepared: job_reply(session, adoption.store(session, prepared, caller.owner, homes)),
            )
    submission.wake()
    return answer


def _plan(data: Any, adopt: str | None, submission: LocalSubmission) -> PlanView:
    """Return the plan of a submission; nothing is stored. ``adopt``: the directory of a run to continue, also checked."""
    plan = submit.dry_run(data, submission)
    if adopt is None:
        return plan
    return plan.model_copy(update={"warnings": [*plan.warnings, *adoption.check(data, adopt, submission)]})


@router.get("/v1/jobs", dependencies=[needs(Scope.JOBS_READ)], summary="List jobs")
def list_jobs(
    service: ServiceDep,
    phase: Annotated[list[JobPhase] | None, Query(description="Jobs in any of these phases.")] = None,
    label: Annotated[
        list[Annotated[str, Query(max_length=400)]] | None,
        Query(max_length=64, description="key=value; all of them must match."),
    ] = None,
    name: Annotated[str | None, Query(max_length=100, description="The whole name.")] = None,
    owner: Annotated[str | None, Query(max_length=100, description="Whose jobs.")] = None,
    search: Annotated[
        str | None, Query(min_length=1, max_length=100, description="What the job's name or id begins with.")
    ] = None,
    include: Annotated[
        list[Literal["summary"]] | None, Query(description="`summary`: each job has its `summary`.")
    ] = None,
    sort: Annotated[listing.Sort, Query(description="`-` means descending.")] = "-created",
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[JobView]:
    """One page of jobs. Jobs that are submitted while pages are read make no other job appear twice or not at all."""
    labels = tuple(listing.parse_label(text) for text in label or ())
    job_filter = listing.JobFilter(tuple(phase or ()), labels, name, sort, owner, search)
    with service.database.read() as session:
        return listing.list_jobs(session, job_filter, limit, cursor, summary=bool(include))


@router.get("/v1/jobs/{job_id}", dependencies=[needs(Scope.JOBS_READ)], summary="Read a job")
def get_job(service: ServiceDep, job_id: str, response: Response) -> JobView:
    """The job's current state. The ETag changes with phase, desired state, spec, labels, priority and requests for a checkpoint,
    not with progress.

    While the disk of a SQLite database is full, a job that has not ended has the reason `disk-full` here, which cannot be stored.
    """
    with service.database.read() as session:
        job = find_job(session, job_id)
        response.headers["ETag"] = queries.etag(job)
        view = job_view(session, job)
        spent = job_goodputs(session, [job])[job_id]
        place = queue.job_position(session, job)
    homes = service.settings.paths
    work = homes.job(job_id).work_dir
    more: dict[str, Any] = {
        "environment": job_history.newest_environment(homes, job_id, view.attempt),
        "goodput": spent,
        "position": place.position,
        "ahead_at_least": place.min_ahead,
        "work_dir": str(work) if work.is_dir() else None,
    }
    full = None if job.phase.terminal else disk_space.database_disk_full(service.database)
    if full is not None:
        more.update(reason=Reason.DISK_FULL.value, message=full.detail)
    return view.model_copy(update=more)


@router.patch(
    "/v1/jobs/{job_id}",
    dependencies=[needs(Scope.JOBS_WRITE, own_job=True)],
    response_model=JobView,
    openapi_extra=openapi.body(PatchRequest, openapi.PATCH, required=True),
    summary="Change labels and priority",
)
def patch_job(
    service: ServiceDep,
    job_id: str,
    body: BodyDep,
    caller: Caller,
    if_match: Annotated[str | None, Header(description=openapi.IF_MATCH)] = None,
) -> Response:
    """Changes labels and priority. Labels are merged into the job's; null removes one. The spec stays as it was submitted."""
    request = parse(PatchRequest, decode(body))
    with service.database.write(caller) as session:
        job = update_job.patch(session, job_id, request, if_match)
        answer = reply(200, job_view(session, job), ETag=queries.etag(job))
    service.submission.wake()
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
            description="Also delete the files in its working directory; for a job already deleted without them, its owner "
            "or an admin deletes them now."
        ),
    ] = False,
    if_match: Annotated[str | None, Header(description=openapi.IF_MATCH)] = None,
) -> DeleteResult:
    """Deletes the job's history, its logs and, unless kept, its checkpoints. This cannot be undone. The files in its working
    directory stay unless `outputs` is true. If they stay, the response has their directory."""
    return deletion.delete(
        service.database,
        job_id,
        keep_checkpoints=keep_checkpoints,
        outputs=outputs,
        if_match=if_match,
        homes=service.settings.paths,
        caller=caller,
    )
