"""What routers share: the service's parts, bodies, answers, content negotiation, and refusal of unknown query parameters."""

from __future__ import annotations

import asyncio
import difflib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeVar

from fastapi import Depends, Query, Request, Response
from fastapi.dependencies.models import Dependant
from pydantic import AfterValidator, AwareDatetime, BaseModel
from sqlalchemy.orm import Session

from ratchet_contract.errors import FieldProblem, Refused
from ratchet_service.agent_reports.control_watch import ControlWatch
from ratchet_service.agent_reports.deduplicate import AcknowledgedReports
from ratchet_service.agent_reports.report_pacing import Pacing
from ratchet_service.api.authentication import Gate
from ratchet_service.api.code_upload import Uploads
from ratchet_service.api.idempotency import Call, Idempotency, Reply, make_call
from ratchet_service.api.request_body import RawBody, decode, read_body
from ratchet_service.config.settings import Settings
from ratchet_service.db.engine import Database
from ratchet_service.observability import logging
from ratchet_service.observability.health import Health
from ratchet_service.submission.local_submission import LocalSubmission
from ratchet_service.usecases.compare import Comparer
from ratchet_service.usecases.export import Exporter
from ratchet_service.usecases.output_files import Files

T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """The parts of one running app, which routes get from ``request.app.state.service``."""

    settings: Settings
    database: Database
    submission: LocalSubmission
    idempotency: Idempotency
    exporter: Exporter
    comparer: Comparer
    files: Files
    uploads: Uploads
    gate: Gate
    health: Health
    control_watch: ControlWatch
    pacing: Pacing = field(default_factory=Pacing)
    acknowledged: AcknowledgedReports = field(default_factory=AcknowledgedReports)


async def get_service(request: Request) -> Service:
    """Return the parts of the running app."""
    # asynchronous, like all dependencies that do not block: FastAPI would run a plain function in a thread
    service: Service = request.app.state.service
    return service


async def get_body(request: Request) -> RawBody:
    """Return the request body, at most ``max_body_bytes`` of the settings. Raises as ``read_body`` does."""
    return await read_body(request, (await get_service(request)).settings.max_body_bytes)


async def get_report_body(request: Request) -> RawBody:
    """Return the body of an agent's report, at most ``max_report_body_bytes`` of the settings. Raises as ``read_body`` does."""
    return await read_body(request, (await get_service(request)).settings.max_report_body_bytes)


@asynccontextmanager
async def disconnect_event(request: Request) -> AsyncIterator[threading.Event]:
    """Yield an event that is set when the client disconnects, and at the latest when the block ends. Discards unread body."""
    disconnect = threading.Event()

    async def watch() -> None:
        """Wait until the client disconnects, then set the event."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        disconnect.set()

    watching = asyncio.create_task(watch())
    try:
        yield disconnect
    finally:
        disconnect.set()
        watching.cancel()


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise ``Refused`` for an undeclared query parameter (ignoring a misspelt filter would give a wrong answer) or a NUL in
    the query. Adds job and attempt to the request's log lines."""
    # job id and attempt for this request's later log lines
    number = str(request.path_params.get("number", ""))
    attempt = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else None
    logging.add_log_fields(job_id=request.path_params.get("job_id"), attempt=attempt)
    if "\0" in request.url.query or "%00" in request.url.query:
        raise Refused("a query parameter holds a NUL character", code="invalid-character")
    known = _query_names(request.scope["route"].dependant)
    problems = [
        FieldProblem(pointer=f"/query/{name}", code="unknown-parameter", detail=_unknown_parameter_text(name, known))
        for name in request.query_params
        if name not in known
    ]
    if problems:
        raise Refused(problems[0].detail, code="unknown-parameter", errors=problems)


def _query_names(dependant: Dependant) -> list[str]:
    """Return the names of the query parameters that a route and its dependencies declare."""
    own = [parameter.alias for parameter in dependant.query_params]
    return own + [name for child in dependant.dependencies for name in _query_names(child)]


def _unknown_parameter_text(name: str, known: list[str]) -> str:
    """Return the error text for the parameter ``name``, with the most similar name in ``known``, if one is similar."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown query parameter {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


ServiceDep = Annotated[Service, Depends(get_service)]
BodyDep = Annotated[RawBody, Depends(get_body)]
Limit = Annotated[int, Query(ge=1, le=100, description="Items per page.")]
Cursor = Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the previous page.")]


def _in_utc(value: datetime) -> datetime:
    """Return the time in UTC. Raises ``ValueError`` for a year that leaves no room for calculations."""
    if not 1970 <= value.year < 9999:
        raise ValueError("the year must be 1970 to 9998")
    return value.astimezone(UTC)


Time = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time of a query, with a time zone."""


class Poster:
    """A POST request with its decoded body, to be run once per Idempotency-Key."""

    def __init__(self, request: Request, service: Service, data: Any) -> None:
        """``data``: the request's decoded body. Raises ``Refused`` (``invalid-idempotency-key``) for an invalid
        Idempotency-Key."""
        key = request.headers.get("idempotency-key")
        query = request.query_params.multi_items()
        self._service = service
        self._call: Call = make_call(key, request.state.caller, request.method, request.url.path, query, data)

    def run(self, prepare: Callable[[], T], effect: Callable[[Session, T], Reply]) -> Response:
        """Run ``prepare``, then ``effect`` in a write transaction, and return the response. If an answer is stored for the
        request's Idempotency-Key, return that answer instead."""
        return respond(self._service.idempotency.run(self._call, prepare, effect))


def json_poster(request: Request, service: ServiceDep, body: BodyDep) -> tuple[Poster, Any]:
    """Return the POST request and its data, decoded from JSON. Raises as ``decode`` and ``Poster`` do."""
    data = decode(body)
    return Poster(request, service, data), data


def spec_poster(request: Request, service: ServiceDep, body: BodyDep) -> tuple[Poster, Any]:
    """Return the POST request and its data, decoded from JSON or YAML. Raises as ``decode`` and ``Poster`` do."""
    data = decode(body, yaml=True)
    return Poster(request, service, data), data


JsonPost = Annotated[tuple[Poster, Any], Depends(json_poster)]
SpecPost = Annotated[tuple[Poster, Any], Depends(spec_poster)]


def reply(status: int, view: BaseModel, **headers: str) -> Reply:
    """Return an answer with ``view`` as its JSON body. In the names of ``headers``, "_" stands for "-"."""
    return Reply(status, view.model_dump_json(), {k.replace("_", "-"): v for k, v in headers.items()})


def respond(answer: Reply) -> Response:
    """Return ``answer`` as FastAPI's response."""
    return Response(answer.body, answer.status, answer.headers, answer.media_type)


JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
TEXT: Final = "text/plain"
CSV: Final = "text/csv"
EVENTS: Final = "text/event-stream"


def negotiate_media_type(accept: str | None, offers: Sequence[str]) -> str:
    """Return the media type in ``offers`` that the Accept header prefers (RFC 9110, 12.5.1). Raises ``Refused`` if none."""
    best, best_quality = None, 0.0
    for offer in offers:
        quality = _quality(accept or "*/*", offer)
        if quality > best_quality:
            best, best_quality = offer, quality
    if best is None:
        raise Refused(f"none of {', '.join(offers)} is acceptable to {accept!r}", code="not-acceptable")
    return best


def _quality(accept: str, offer: str) -> float:
    """Return the quality, 0 to 1, that the Accept header gives to ``offer``."""
    found, specific = 0.0, -1
    for part in accept.split(","):
        media, *parameters = (p.strip().lower() for p in part.split(";"))
        rank = {offer: 2, offer.partition("/")[0] + "/*": 1, "*/*": 0}.get(media, -1)
        if rank > specific:
            quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
            try:
                found, specific = min(1.0, max(0.0, float(quality))), rank
            except ValueError:
                continue
    return found
