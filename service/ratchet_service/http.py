"""What every router uses: the service's parts, bodies, answers, negotiation, and refusal of unknown query parameters."""

from __future__ import annotations

import asyncio
import difflib
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, TypeVar

from fastapi import Depends, Query, Request, Response
from fastapi.dependencies.models import Dependant
from pydantic import BaseModel
from sqlalchemy.orm import Session

from ratchet_contract.errors import FieldProblem, Refused
from ratchet_service import log_format
from ratchet_service.access import Gate
from ratchet_service.bodies import RawBody, decode, read_body
from ratchet_service.database import Database
from ratchet_service.health import Health
from ratchet_service.idempotency import Call, Idempotency, Reply, make_call
from ratchet_service.ingest_news import Told
from ratchet_service.pacing import Pacing
from ratchet_service.ports import SubmissionPorts
from ratchet_service.settings import Settings
from ratchet_service.usecases.comparison import Comparer
from ratchet_service.usecases.export import Exporter
from ratchet_service.usecases.files import Files
from ratchet_service.usecases.upload import Uploads

T = TypeVar("T")


@dataclass(frozen=True)
class Service:
    """The parts of one running app."""

    settings: Settings
    database: Database
    ports: SubmissionPorts
    idempotency: Idempotency
    exporter: Exporter
    comparer: Comparer
    files: Files
    uploads: Uploads
    gate: Gate
    health: Health
    pacing: Pacing = field(default_factory=Pacing)
    told: Told = field(default_factory=Told)


async def get_service(request: Request) -> Service:
    """Asynchronous, like what else waits for nothing here: a plain function would be handed to a thread for every request."""
    service: Service = request.app.state.service
    return service


async def get_body(request: Request) -> RawBody:
    return await read_body(request, (await get_service(request)).settings.max_body)


async def get_report_body(request: Request) -> RawBody:
    return await read_body(request, (await get_service(request)).settings.max_report_body)


@asynccontextmanager
async def disconnected(request: Request) -> AsyncIterator[threading.Event]:
    """Set when the client goes or the service ends, for a thread that works at the answer."""
    gone = threading.Event()

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone.set()

    watching = asyncio.create_task(watch())
    try:
        yield gone
    finally:
        gone.set()
        watching.cancel()


async def refuse_unknown_parameters(request: Request) -> None:
    """A misspelt filter that is ignored would give a wrong answer that looks right. What is logged from here on names the job."""
    number = str(request.path_params.get("number", ""))
    attempt = int(number) if number.isascii() and number.isdigit() and len(number) < 10 else None
    log_format.now_about(job_id=request.path_params.get("job_id"), attempt=attempt)
    if "\0" in request.url.query or "%00" in request.url.query:
        raise Refused("a query parameter holds a NUL character", code="invalid-character")
    known = _query_names(request.scope["route"].dependant)
    problems = [
        FieldProblem(pointer=f"/query/{name}", code="unknown-parameter", detail=_unknown(name, known))
        for name in request.query_params
        if name not in known
    ]
    if problems:
        raise Refused(problems[0].detail, code="unknown-parameter", errors=problems)


def _query_names(dependant: Dependant) -> list[str]:
    own = [parameter.alias for parameter in dependant.query_params]
    return own + [name for child in dependant.dependencies for name in _query_names(child)]


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"unknown query parameter {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


ServiceDep = Annotated[Service, Depends(get_service)]
BodyDep = Annotated[RawBody, Depends(get_body)]
Limit = Annotated[int, Query(ge=1, le=100, description="Items per page.")]
Cursor = Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the page before.")]


class Poster:
    """A POST with its decoded body; ``run`` does its effect once per Idempotency-Key."""

    def __init__(self, request: Request, service: Service, data: Any) -> None:
        key = request.headers.get("idempotency-key")
        query = request.query_params.multi_items()
        self._service = service
        self._call: Call = make_call(key, request.state.caller.owner, request.method, request.url.path, query, data)

    def run(self, prepare: Callable[[], T], effect: Callable[[Session, T], Reply]) -> Response:
        return respond(self._service.idempotency.run(self._call, prepare, effect))


def json_poster(request: Request, service: ServiceDep, body: BodyDep) -> tuple[Poster, Any]:
    data = decode(body)
    return Poster(request, service, data), data


def spec_poster(request: Request, service: ServiceDep, body: BodyDep) -> tuple[Poster, Any]:
    data = decode(body, yaml=True)
    return Poster(request, service, data), data


JsonPost = Annotated[tuple[Poster, Any], Depends(json_poster)]
SpecPost = Annotated[tuple[Poster, Any], Depends(spec_poster)]


def reply(status: int, view: BaseModel, **headers: str) -> Reply:
    return Reply(status, view.model_dump_json(), {k.replace("_", "-"): v for k, v in headers.items()})


def respond(answer: Reply) -> Response:
    return Response(answer.body, answer.status, answer.headers, answer.media_type)


JSON: Final = "application/json"
LINES: Final = "application/x-ndjson"
TEXT: Final = "text/plain"
EVENTS: Final = "text/event-stream"


def choose(accept: str | None, offers: Sequence[str]) -> str:
    """The offer that the Accept header likes best; the first one for a tie (RFC 9110, 12.5.1). Raises ``Refused``."""
    best, best_quality = None, 0.0
    for offer in offers:
        quality = _quality(accept or "*/*", offer)
        if quality > best_quality:
            best, best_quality = offer, quality
    if best is None:
        raise Refused(f"none of {', '.join(offers)} is acceptable to {accept!r}", code="not-acceptable")
    return best


def _quality(accept: str, offer: str) -> float:
    """Of the most specific range that covers ``offer``; a range that cannot be read covers nothing."""
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
