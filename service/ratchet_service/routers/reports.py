"""Agents report here, and are told what is wanted."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response
from starlette.concurrency import run_in_threadpool

from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.messages import AgentReport, ReportAck
from ratchet_contract.version import REPORT_AFTER_HEADER
from ratchet_service import log_format, openapi
from ratchet_service.access import AGENTS, bearer
from ratchet_service.bodies import RawBody, decode, parse
from ratchet_service.http import JSON, Service, get_report_body
from ratchet_service.ingest import ingest, insist_on_protocol
from ratchet_service.instruments import Instruments

router = APIRouter(tags=["agents"])


@router.post(
    "/v1/jobs/{job_id}/attempts/{number}/reports",
    dependencies=[AGENTS],
    openapi_extra=openapi.body(AgentReport, None, required=True),
    response_model=ReportAck,
    summary="Report of an agent",
)
async def report(
    request: Request,
    job_id: str,
    number: str,
    authorization: Annotated[str | None, Header(description="Bearer and the token of the attempt.")] = None,
) -> Response:
    """Everything that ranks said since the last acknowledgement. 409 `stale-epoch`: the attempt is over, end its ranks.

    `Ratchet-Report-After` in the answer: so many seconds may pass until a report that has only figures to tell."""
    # Asynchronous, with an answer made here: what FastAPI does for others is a third of what a report costs.
    body = await get_report_body(request)
    service: Service = request.app.state.service
    return await run_in_threadpool(_report, service, request.app.state.instruments, job_id, number, body, authorization)


def _report(
    service: Service, instruments: Instruments, job_id: str, number: str, body: RawBody, authorization: str | None
) -> Response:
    begin = time.thread_time()
    data = decode(body, storable=False)  # a rank may say anything, and must not be stuck with it
    try:
        insist_on_protocol(data)  # before anything else of it is understood
    except Refused:
        instruments.refused_report()
        raise
    told = parse(AgentReport, data)
    if told.job_id != job_id or str(told.epoch) != number:
        raise NotFound(
            f"the report is of attempt {told.epoch} of {told.job_id}, the path of another", code="attempt-not-found"
        )
    service.gate.of_node(told.job_id, told.epoch, told.node)
    log_format.now_about(node=told.node)
    with instruments.reporting():
        ack = ingest(
            service.database, told, bearer(authorization), service.settings.paths, service.settings.bounds, service.told
        )
    if told.result is not None:
        service.ports.wake()
    # Without what is null: an agent of the version before knows fewer keys, and refuses what it does not know.
    answer = Response(ack.model_dump_json(exclude_none=True), media_type=JSON)
    after = service.pacing.reported((told.job_id, told.epoch, told.node), time.thread_time() - begin)
    if after:
        answer.headers[REPORT_AFTER_HEADER] = f"{after:.1f}"
    return answer
