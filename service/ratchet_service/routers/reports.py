"""Agents report here, and are told what is wanted."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request

from ratchet_contract.errors import NotFound
from ratchet_contract.messages import AgentReport, ReportAck
from ratchet_service import log_format, openapi
from ratchet_service.access import AGENTS, bearer
from ratchet_service.bodies import RawBody, decode, parse
from ratchet_service.http import ServiceDep, get_report_body
from ratchet_service.ingest import ingest
from ratchet_service.instruments import Instruments

router = APIRouter(tags=["agents"])


@router.post(
    "/v1/jobs/{job_id}/attempts/{number}/reports",
    dependencies=[AGENTS],
    openapi_extra=openapi.body(AgentReport, None, required=True),
    response_model_exclude_none=True,  # an agent of the version before knows fewer keys, and refuses what it does not know
    summary="Report of an agent",
)
def report(
    service: ServiceDep,
    job_id: str,
    number: str,
    request: Request,
    body: Annotated[RawBody, Depends(get_report_body)],
    authorization: Annotated[str | None, Header(description="Bearer and the token of the attempt.")] = None,
) -> ReportAck:
    """Everything that ranks said since the last acknowledgement. 409 `stale-epoch`: the attempt is over, end its ranks."""
    instruments: Instruments = request.app.state.instruments
    told = parse(AgentReport, decode(body, storable=False))  # a rank may say anything, and must not be stuck with it
    if told.job_id != job_id or str(told.epoch) != number:
        raise NotFound(
            f"the report is of attempt {told.epoch} of {told.job_id}, the path of another", code="attempt-not-found"
        )
    service.gate.of_node(told.job_id, told.epoch, told.node)
    log_format.now_about(node=told.node)
    with instruments.reporting():
        ack = ingest(service.database, told, bearer(authorization), service.settings.paths, service.settings.bounds)
    if told.result is not None:
        service.ports.wake()
    return ack
