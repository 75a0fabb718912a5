"""Health and metrics of the service itself."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from ratchet_contract.access import Scope
from ratchet_contract.version import RATCHET_VERSION
from ratchet_service import disk
from ratchet_service.access import OPEN, needs
from ratchet_service.http import ServiceDep
from ratchet_service.instruments import Instruments

router = APIRouter(tags=["operations"])


class Health(BaseModel):
    status: str = "ok"
    version: str = RATCHET_VERSION


@router.get("/healthz", dependencies=[OPEN], summary="The process answers")
def healthz() -> Health:
    return Health()


@router.get("/readyz", dependencies=[OPEN], summary="The database answers too")
def readyz(service: ServiceDep) -> Health:
    """503 `database-unavailable` when it does not, 507 `disk-full` when its disk has no room for a change."""
    service.database.ping()
    full = disk.without_room(service.database)
    if full is not None:
        raise full
    return Health()


@router.get(
    "/metrics",
    dependencies=[needs(Scope.METRICS_READ)],
    response_class=Response,
    summary="Prometheus metrics",
    responses={200: {"content": {"text/plain": {}}}},
)
def metrics(request: Request, service: ServiceDep) -> Response:
    """Requests and their durations, and jobs by phase."""
    instruments: Instruments = request.app.state.instruments
    return Response(instruments.render(service.database), media_type=CONTENT_TYPE_LATEST)
