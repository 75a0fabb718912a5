"""Routes for the queue, and for quotas: how much an owner may have at one time."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Query, Request, Response

from ratchet_contract.api.fleet import FleetView
from ratchet_contract.api.queue import QueueView
from ratchet_contract.api.quotas import QUOTA_OWNER, QuotaRequest, QuotaView
from ratchet_contract.api.roles import Scope
from ratchet_contract.api.usage import UsageView
from ratchet_contract.api.views import Page
from ratchet_contract.errors import Refused
from ratchet_service.api import openapi
from ratchet_service.api.authentication import Caller, needs
from ratchet_service.api.dependencies import (
    CSV,
    JSON,
    BodyDep,
    Cursor,
    Limit,
    ServiceDep,
    Time,
    negotiate_media_type,
    reply,
    respond,
)
from ratchet_service.api.request_body import decode, parse
from ratchet_service.observability.metrics import Instruments
from ratchet_service.usecases import fleet, queue, quotas, usage

router = APIRouter(tags=["quotas"])
Of = Annotated[str | None, Query(max_length=100, description="Only this job.")]


@router.get("/v1/queue", dependencies=[needs(Scope.JOBS_READ)], summary="Who is next")
def get_queue(service: ServiceDep, limit: Limit = 50, cursor: Cursor = None, job_id: Of = None) -> QueueView:
    """The queued jobs in the order in which they start, and why each waits. The order is by priority, then in turns of their
    owners, then by age.

    The list has the jobs of all owners, at most 5000, without those in a back-off. `job_id`: only that job, with its
    position and what it waits for; no item if it is not queued.
    """
    with service.database.read() as session:
        return queue.page(session, limit, cursor) if job_id is None else queue.job_entry(session, job_id)


@router.get("/v1/fleet", dependencies=[needs(Scope.JOBS_READ)], summary="What all jobs together do")
def get_fleet(
    service: ServiceDep,
    request: Request,
    days: Annotated[int, Query(ge=1, le=90, description="Length of the window that ends now.")] = 7,
) -> FleetView:
    """Jobs by phase, slots and their holders, and for the last days: ends by cause and by host, use by owner, how time was spent,
    and resumes by verdict. Of all owners."""
    with service.database.read() as session:
        view = fleet.fleet(session, service.submission.capacity(), days)
    instruments: Instruments = request.app.state.instruments
    return view.model_copy(update={"parked": instruments.view_parked()})


_USAGE_FORMS: dict[int | str, dict[str, Any]] = {200: {"content": {CSV: {"schema": {"type": "string"}}}}}
_USAGE_DAYS = timedelta(days=30)
_MAX_USAGE_DAYS = 366


@router.get(
    "/v1/usage",
    dependencies=[needs(Scope.JOBS_READ)],
    response_model=UsageView,
    responses=_USAGE_FORMS,
    summary="Hours of GPUs, CPU slots and ranks",
)
def get_usage(
    service: ServiceDep,
    since: Annotated[Time | None, Query(description="Start of the interval. Default: 30 days before its end.")] = None,
    until: Annotated[Time | None, Query(description="End of the interval. Default: now.")] = None,
    by: Annotated[
        str, Query(max_length=100, pattern="^(owner|label:.+)$", description="`owner`, or `label:KEY`.")
    ] = "owner",
    accept: Annotated[str | None, Header()] = None,
) -> Response | UsageView:
    """What attempts have used in an interval, by the owner of their job or by the value of one of its labels. An attempt counts
    from the start of its first agent to its end, within the interval. The hours of deleted jobs are gone. From `since` to `until`
    are at most 366 days.

    By Accept: JSON, or `text/csv` with a header. In CSV, a value that begins with `=`, `+`, `-`, `@`, a tab or a line end has a
    `'` in front, so that no spreadsheet runs it as a formula; jobs without the label have an empty cell.
    """
    form = negotiate_media_type(accept, [JSON, CSV])
    until = until or service.database.clock.now()
    since = since or until - _USAGE_DAYS
    if since >= until:
        raise Refused("since must be before until", code="invalid-parameter")
    if until - since > timedelta(days=_MAX_USAGE_DAYS):
        text = f"from since to until are at most {_MAX_USAGE_DAYS} days: request shorter intervals one by one"
        raise Refused(text, code="invalid-parameter")
    with service.database.read() as session:
        found = usage.usage(session, since, until, by)
    return found if form == JSON else Response(usage.as_csv(found), media_type=CSV)


Owner = Annotated[
    str, Path(pattern=QUOTA_OWNER, description="An owner, or `*`: each owner without a quota of its own.")
]


@router.get("/v1/quotas", dependencies=[needs(Scope.JOBS_READ)], summary="List quotas")
def list_quotas(service: ServiceDep) -> Page[QuotaView]:
    """All quotas that were set, on one page, each with its owner's current use. The quota of `*` has no use."""
    with service.database.read() as session:
        return quotas.list_quotas(session)


@router.get("/v1/quotas/{owner}", dependencies=[needs(Scope.JOBS_READ)], summary="Read an owner's quota")
def get_quota(service: ServiceDep, owner: Owner) -> QuotaView:
    """The owner's effective quota (its own, that of `*`, or none) and its current use."""
    with service.database.read() as session:
        return quotas.get_quota(session, owner)


@router.put(
    "/v1/quotas/{owner}",
    response_model=QuotaView,
    dependencies=[needs(Scope.QUOTAS_WRITE)],
    openapi_extra=openapi.body(QuotaRequest, openapi.QUOTA, required=True),
    summary="Set a quota",
)
def put_quota(service: ServiceDep, caller: Caller, owner: Owner, body: BodyDep) -> Response:
    """Replaces the owner's whole quota: a key that is omitted has no limit. Running jobs are not stopped."""
    request = parse(QuotaRequest, decode(body))
    with service.database.write(caller) as session:
        view = quotas.set_quota(session, owner, request)
    service.submission.wake()
    return respond(reply(200, view))


@router.delete(
    "/v1/quotas/{owner}", status_code=204, dependencies=[needs(Scope.QUOTAS_WRITE)], summary="Delete a quota"
)
def delete_quota(service: ServiceDep, caller: Caller, owner: Owner) -> Response:
    """Deletes the owner's own quota. Afterwards the quota of `*`, if set, applies to the owner."""
    with service.database.write(caller) as session:
        quotas.delete_quota(session, owner)
    service.submission.wake()
    return Response(status_code=204)
