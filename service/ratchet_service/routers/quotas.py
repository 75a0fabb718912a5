"""Quotas: how much an owner may have at one time."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from ratchet_contract.access import Scope
from ratchet_contract.api import Page
from ratchet_contract.api_quotas import QUOTA_OWNER, QuotaRequest, QuotaView
from ratchet_service import examples, openapi
from ratchet_service.access import needs
from ratchet_service.bodies import decode, parse
from ratchet_service.http import BodyDep, ServiceDep, reply, respond
from ratchet_service.usecases import quotas

router = APIRouter(tags=["quotas"])
Owner = Annotated[
    str, Path(pattern=QUOTA_OWNER, description="An owner, or `*`: each owner without a quota of its own.")
]


@router.get("/v1/quotas", dependencies=[needs(Scope.JOBS_READ)], summary="List quotas")
def list_quotas(service: ServiceDep) -> Page[QuotaView]:
    """Those that were set, all on one page, with what their owners have now."""
    with service.database.read() as session:
        return quotas.every(session)


@router.get("/v1/quotas/{owner}", dependencies=[needs(Scope.JOBS_READ)], summary="Read an owner's quota")
def get_quota(service: ServiceDep, owner: Owner) -> QuotaView:
    """What counts for the owner, be it that of `*` or none, and what it has now."""
    with service.database.read() as session:
        return quotas.of(session, owner)


@router.put(
    "/v1/quotas/{owner}",
    response_model=QuotaView,
    dependencies=[needs(Scope.QUOTAS_WRITE)],
    openapi_extra=openapi.body(QuotaRequest, examples.QUOTA, required=True),
    summary="Set a quota",
)
def put_quota(service: ServiceDep, owner: Owner, body: BodyDep) -> Response:
    """The whole quota: what is left out has no limit. Nothing that runs is stopped for it."""
    request = parse(QuotaRequest, decode(body))
    with service.database.write() as session:
        view = quotas.put(session, owner, request)
    service.ports.wake()
    return respond(reply(200, view))


@router.delete(
    "/v1/quotas/{owner}", status_code=204, dependencies=[needs(Scope.QUOTAS_WRITE)], summary="Take a quota away"
)
def delete_quota(service: ServiceDep, owner: Owner) -> Response:
    """From then on that of `*` counts for the owner, if there is one."""
    with service.database.write() as session:
        quotas.delete(session, owner)
    service.ports.wake()
    return Response(status_code=204)
