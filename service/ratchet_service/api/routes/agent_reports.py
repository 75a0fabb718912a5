"""The route for agents' reports. The response has the job's desired state."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from ratchet_contract.errors import NotFound, Refused
from ratchet_contract.phases import Desired
from ratchet_contract.protocol.messages import AgentReport, ControlNews, ReportAck
from ratchet_contract.version import REPORT_AFTER_HEADER
from ratchet_service.agent_reports.control_watch import Requests
from ratchet_service.agent_reports.ingest import check_protocol, ingest
from ratchet_service.api import openapi
from ratchet_service.api.authentication import AGENTS, bearer_token
from ratchet_service.api.dependencies import JSON, Service, ServiceDep, get_report_body
from ratchet_service.api.request_body import RawBody, decode, parse
from ratchet_service.db.types import MAX_NUMBER
from ratchet_service.observability import logging
from ratchet_service.observability.metrics import Instruments

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
    """A report has messages of the ranks after the acknowledged ones. The response has the acknowledged numbers and the
    job's desired state. 409 `stale-attempt`: the attempt is over; the agent must end its ranks.

    The response header `Ratchet-Report-After`, if present, has the seconds that the agent must wait before its next report with
    only figures, such as metrics.
    """
    # Asynchronous, with an answer made here: what FastAPI does for others is a third of what a report costs.
    body = await get_report_body(request)
    service: Service = request.app.state.service
    return await run_in_threadpool(_report, service, request.app.state.instruments, job_id, number, body, authorization)


@router.get(
    "/v1/jobs/{job_id}/attempts/{number}/control",
    dependencies=[AGENTS],
    response_model=ControlNews,
    summary="Wait for a request to the job",
)
async def control(
    service: ServiceDep,
    job_id: str,
    number: str,
    desired: Annotated[Desired, Query(description="`control.desired` of the last answer to a report.")],
    checkpoint_request: Annotated[
        int, Query(ge=0, le=MAX_NUMBER, description="`control.checkpoint_request` of that answer.")
    ],
    wait: Annotated[float, Query(ge=0, le=60, allow_inf_nan=False, description="Most seconds until the answer.")],
    authorization: Annotated[str | None, Header(description="Bearer and the token of the attempt.")] = None,
) -> Response:
    """Answers with `changed: true` as soon as the desired state or the number of requested checkpoints differs from the given
    one, or the attempt is over: the agent must report at once. Otherwise it answers after `wait` seconds. With many jobs, reports
    of an agent are seconds apart; this call lets it learn of a stop within a second.
    """
    known = Requests(int(number), desired, checkpoint_request)
    changed = await service.control_watch.wait(job_id, known, wait)
    return Response(ControlNews(changed=changed).model_dump_json(), media_type=JSON)


def _report(
    service: Service, instruments: Instruments, job_id: str, number: str, body: RawBody, authorization: str | None
) -> Response:
    """Store the report in ``body``, and return the acknowledgement with the job's desired state. Raises ``Refused``,
    ``SpecError``, ``NotFound`` and ``Stale``."""
    begin = time.thread_time()
    data = decode(body, check_storable=False)  # a rank may say anything, and must not be stuck with it
    try:
        check_protocol(data)  # before anything else of it is understood
    except Refused:
        instruments.count_refused_report()
        raise
    agent_report = parse(AgentReport, data)
    if agent_report.job_id != job_id or str(agent_report.attempt) != number:
        raise NotFound(
            f"the report is of attempt {agent_report.attempt} of {agent_report.job_id}, the path of another",
            code="attempt-not-found",
        )
    service.gate.limit_node(agent_report.job_id, agent_report.attempt, agent_report.node)
    logging.add_log_fields(node=agent_report.node)
    with instruments.count_report():
        ack = ingest(
            service.database,
            agent_report,
            bearer_token(authorization),
            service.settings.paths,
            service.settings.bounds,
            service.acknowledged,
        )
    if agent_report.result is not None:
        service.submission.wake()
    answer = Response(ack.model_dump_json(exclude_none=True), media_type=JSON)
    after = service.pacing.record_report(
        (agent_report.job_id, agent_report.attempt, agent_report.node), time.thread_time() - begin
    )
    if after:
        answer.headers[REPORT_AFTER_HEADER] = f"{after:.1f}"
    return answer
