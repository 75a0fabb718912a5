"""Health and metrics of the service itself."""

from __future__ import annotations

import logging

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel

from ratchet_contract.api.roles import Scope
from ratchet_contract.errors import RatchetError
from ratchet_contract.version import RATCHET_VERSION
from ratchet_service.api import problem_json
from ratchet_service.api.authentication import OPEN, needs
from ratchet_service.api.dependencies import ServiceDep
from ratchet_service.api.middleware import problem_response
from ratchet_service.observability.health import Component, check
from ratchet_service.observability.metrics import Instruments

router = APIRouter(tags=["operations"])
log = logging.getLogger(__name__)


class Alive(BaseModel):
    """The process answers requests."""

    status: str = "ok"
    version: str = RATCHET_VERSION


class Ready(Alive):
    """The service can accept requests. ``components``: the state of each checked component, by name."""

    components: dict[str, Component]


@router.get("/healthz", dependencies=[OPEN], summary="The process answers")
def healthz() -> Alive:
    """200 as long as the process answers. Nothing else is checked: a process that answers must not be killed because its database
    is unavailable."""
    return Alive()


@router.get("/readyz", dependencies=[OPEN], response_model=Ready, summary="The service can take requests")
def readyz(service: ServiceDep, request: Request) -> Ready | Response:
    """200 with the checked components if the service can accept requests. Else 503 with a code: `database-unavailable`;
    `schema-newer`, `schema-older`, `schema-unsupported` (the database does not have this version's revision);
    `run-directory-unwritable`; `reconciler-failing` (the last rounds of this process's reconciler failed); `reconciler-stalled`
    (this process's reconciler has finished no round for a minute, or it finishes its maximum number of attempts and each takes
    longer than that); `shutting-down`. 507 `disk-full`. Reconcilers of other processes never make this process unready: an API
    without a reconciler still accepts requests."""
    health = service.health
    try:
        found = check(health, service.database, service.settings.paths)
    except RatchetError as error:
        if health.is_new_code(error.code):
            log.warning("not ready: %s: %s", error.code, error.detail)
        return problem_response(problem_json.status_of(error), error.code, error.detail, request.url.path)
    if health.is_new_code(None):
        log.info("ready")
    return Ready(components=found)


@router.get(
    "/metrics",
    dependencies=[needs(Scope.METRICS_READ)],
    response_class=Response,
    summary="Prometheus metrics",
    responses={200: {"content": {"text/plain": {}}}},
)
def metrics(request: Request, service: ServiceDep) -> Response:
    """Metrics of this process and of the jobs in the database; docs/monitoring.md lists all."""
    instruments: Instruments = request.app.state.instruments
    return Response(instruments.render(service.database), media_type=CONTENT_TYPE_LATEST)
