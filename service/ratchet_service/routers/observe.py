"""Hook state, metrics, events and logs of a job."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from ratchet_contract.access import Scope
from ratchet_contract.api import EventView, HookSampleView, HookView, LogLine, MetricsView, Page
from ratchet_contract.errors import NotFound, Refused
from ratchet_service import http
from ratchet_service.access import needs
from ratchet_service.http import Cursor, Limit, Service, ServiceDep
from ratchet_service.sse import END, Look, follow, frame
from ratchet_service.usecases import events, logs, series
from ratchet_service.usecases.queries import find_attempt, find_job

router = APIRouter(tags=["observation"])
_BATCH = 500
_COMMENT = ": nothing new\n\n"
_MaxName = Annotated[str, Query(max_length=200)]


@router.get("/v1/jobs/{job_id}/hook", dependencies=[needs(Scope.JOBS_READ)], summary="State of the communication hook")
def get_hook(service: ServiceDep, job_id: str) -> HookView:
    """Newest summaries of all ranks of the running attempt; else those of the checkpoint that the next attempt starts from."""
    with service.database.read() as session:
        return series.hook(session, job_id, service.settings.paths)


@router.get(
    "/v1/jobs/{job_id}/hook/history", dependencies=[needs(Scope.JOBS_READ)], summary="Hook summaries over steps"
)
def get_hook_history(
    service: ServiceDep,
    job_id: str,
    rank: Annotated[int | None, Query(ge=0, le=1_000_000)] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
) -> Page[HookSampleView]:
    """Oldest step first; long histories are thinned."""
    with service.database.read() as session:
        return series.hook_history(session, job_id, rank, limit, cursor)


@router.get("/v1/jobs/{job_id}/metrics", dependencies=[needs(Scope.JOBS_READ)], summary="Metrics over steps")
def get_metrics(
    service: ServiceDep,
    job_id: str,
    name: Annotated[list[_MaxName] | None, Query(description="Only these series; default: all.")] = None,
    max_points: Annotated[int, Query(ge=2, le=10_000, description="Points per series.")] = 1000,
) -> MetricsView:
    """Of a longer series come evenly spaced points of its own. Steps done again replace the earlier ones."""
    with service.database.read() as session:
        return series.metrics(session, job_id, name or [], max_points)


_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {http.EVENTS: {"schema": {"type": "string"}}}, "description": "A page, or a stream of events."}
}


@router.get(
    "/v1/jobs/{job_id}/events",
    dependencies=[needs(Scope.JOBS_READ)],
    response_model=Page[EventView],
    responses=_STREAMS,
    summary="History",
)
def get_events(
    service: ServiceDep,
    job_id: str,
    follow: Annotated[bool, Query(description="Send events as they come (text/event-stream).")] = False,
    attempt: Annotated[int | None, Query(ge=1, le=2**31 - 1, description="A page: only this attempt's.")] = None,
    type: Annotated[str | None, Query(max_length=100, description="A page: only those of this type.")] = None,
    limit: Limit = 100,
    cursor: Cursor = None,
    accept: Annotated[str | None, Header()] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response | Page[EventView]:
    """Oldest first. The stream ends with `event: end` when the job has ended; `Last-Event-ID` goes on after that event."""
    if http.choose(accept, [http.EVENTS] if follow else [http.JSON, http.EVENTS]) == http.JSON:
        with service.database.read() as session:
            return events.list_events(session, job_id, limit, cursor, attempt, type)
    _no_cursor(cursor)
    last = events.parse_last_id(last_event_id)
    with service.database.read() as session:
        find_job(session, job_id)

    def look() -> Look:
        nonlocal last
        try:
            with service.database.read() as session:
                ended = find_job(session, job_id).phase.terminal
                found = events.events_after(session, job_id, last, _BATCH)
        except NotFound:
            return Look([], True)
        last = found[-1].id if found else last
        return Look([frame(str(e.id), e.model_dump_json()) for e in found], ended and len(found) < _BATCH)

    return _stream(service, look, http.EVENTS)


_LOG_FORMS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            http.TEXT: {"schema": {"type": "string"}},
            http.LINES: {"schema": {"type": "string"}},
            http.EVENTS: {"schema": {"type": "string"}},
        },
        "description": "A page of lines; the whole as text or as JSON lines; or a stream.",
    }
}


@router.get(
    "/v1/jobs/{job_id}/logs",
    dependencies=[needs(Scope.JOBS_READ)],
    response_model=Page[LogLine],
    responses=_LOG_FORMS,
    summary="Logs of the ranks",
)
def get_logs(
    service: ServiceDep,
    job_id: str,
    follow: Annotated[bool, Query(description="Go on as lines are written, later attempts included.")] = False,
    tail: Annotated[int | None, Query(ge=0, le=1_000_000, description="Only the last lines of each rank.")] = None,
    since: Annotated[
        datetime | None,
        Query(
            description="Only lines written since then, to about six seconds; one without a time counts by its log's last."
        ),
    ] = None,
    grep: Annotated[str | None, Query(max_length=1000, description="Only lines with this text (no pattern).")] = None,
    rank: Annotated[int | None, Query(ge=0, le=99_999)] = None,
    attempt: Annotated[
        str | None, Query(pattern=r"^(all|[1-9]\d{0,8})$", description="A number, or `all`; default: the newest.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Lines per page.")] = 1000,
    cursor: Cursor = None,
    accept: Annotated[str | None, Header()] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response | Page[LogLine]:
    """By Accept: a JSON page (default), `text/plain` or `application/x-ndjson` with everything, `text/event-stream`.

    Plain text of several ranks has `[attempt.rank]` before each line. A log that is too long has lost its middle: one line tells
    how many bytes (`left_out`). Searches give it too.
    """
    offers = [http.EVENTS, http.TEXT, http.LINES] if follow else [http.JSON, http.TEXT, http.LINES, http.EVENTS]
    form = http.choose(accept, offers)
    if since is not None and since.tzinfo is None:
        raise Refused("since needs a time zone, like 2026-01-31T12:00:00Z", code="invalid-parameter")
    with service.database.read() as session:
        newest = max(1, find_job(session, job_id).epoch)
        following = follow or form == http.EVENTS  # then an attempt that is not there yet is waited for
        if not following and attempt not in (None, "all"):
            find_attempt(session, job_id, str(attempt))
    first, last = (newest, None if following else newest) if attempt is None else (1, None)
    if attempt not in (None, "all"):
        first = last = int(str(attempt))
    wanted = logs.LogFilter(first, last, rank, grep, since, tail)
    paths = service.settings.paths.job(job_id)
    if form == http.JSON:
        return logs.page(paths, job_id, wanted, limit, cursor)
    _no_cursor(cursor)
    write = _writer(form, prefix=rank is None)
    if not following:
        return StreamingResponse((write(line.id, line) for line in logs.read_lines(paths, wanted)), media_type=form)
    follower = logs.Follower(paths, wanted, last_event_id or None)

    def look() -> Look:
        ended = _ended(service, job_id)  # asked before the files are read, or a last line could be missed
        found = follower.poll(_BATCH, last=ended)
        return Look([write(mark, line) for mark, line in found], ended and len(found) < _BATCH)

    return _stream(service, look, form)


def _writer(form: str, prefix: bool) -> Any:
    def text(_mark: str, line: LogLine) -> str:
        return f"[{line.attempt}.{line.rank}] {line.text}\n" if prefix else line.text + "\n"

    def json_line(_mark: str, line: LogLine) -> str:
        return line.model_dump_json() + "\n"

    def event(mark: str, line: LogLine) -> str:
        return frame(mark, line.model_dump_json())

    return {http.TEXT: text, http.LINES: json_line, http.EVENTS: event}[form]


def _ended(service: Service, job_id: str) -> bool:
    try:
        with service.database.read() as session:
            return find_job(session, job_id).phase.terminal
    except NotFound:
        return True


def _no_cursor(cursor: str | None) -> None:
    if cursor is not None:
        raise Refused("a cursor pages through JSON; a stream goes on after Last-Event-ID", code="invalid-parameter")


def _stream(service: Service, look: Any, form: str) -> StreamingResponse:
    settings = service.settings
    events_form = form == http.EVENTS
    chunks = follow(
        look,
        interval=settings.follow_interval,
        keep_alive=settings.keep_alive_interval,
        idle=_COMMENT if events_form else "",
        end=END if events_form else "",
        leaving=lambda: service.health.stopping,
    )
    return StreamingResponse(chunks, media_type=form, headers={"Cache-Control": "no-store"})
