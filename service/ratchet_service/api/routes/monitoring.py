"""Hook state, metrics, events and logs of a job."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Response
from fastapi.responses import StreamingResponse

from ratchet_contract.api.roles import Scope
from ratchet_contract.api.trackers import TrackerView
from ratchet_contract.api.views import EventView, HookSampleView, HookView, LogLine, MetricsView, Page
from ratchet_contract.errors import NotFound, Refused
from ratchet_service.api import dependencies
from ratchet_service.api.authentication import needs
from ratchet_service.api.dependencies import Cursor, Limit, Service, ServiceDep
from ratchet_service.api.sse import END, PollResult, follow, format_event
from ratchet_service.db.queries import find_attempt, find_job
from ratchet_service.db.types import MAX_NUMBER
from ratchet_service.job_files.log_files import LogFilter
from ratchet_service.usecases import job_history, logs, metrics, trackers

router = APIRouter(tags=["observation"])
_BATCH = 500
_COMMENT = ": nothing new\n\n"
FromStep = Annotated[int, Query(ge=0, le=MAX_NUMBER, description="The first step to show.")]
ToStep = Annotated[int | None, Query(ge=0, le=MAX_NUMBER, description="The last step to show; default: no limit.")]
_MaxName = Annotated[str, Query(max_length=200)]


@router.get("/v1/jobs/{job_id}/hook", dependencies=[needs(Scope.JOBS_READ)], summary="State of the communication hook")
def get_hook(service: ServiceDep, job_id: str) -> HookView:
    """The newest summaries of the ranks of the running attempt. Without any, those of the checkpoint from which the next attempt
    starts."""
    with service.database.read() as session:
        return metrics.hook_view(session, job_id, service.settings.paths)


@router.get(
    "/v1/jobs/{job_id}/hook/history", dependencies=[needs(Scope.JOBS_READ)], summary="Hook summaries over steps"
)
def get_hook_history(
    service: ServiceDep,
    job_id: str,
    rank: Annotated[int | None, Query(ge=0, le=1_000_000)] = None,
    max_points: Annotated[
        int | None,
        Query(
            ge=2, le=10_000, description="Steps with summaries of all ranks, evenly spaced; default: all stored steps."
        ),
    ] = None,
    from_step: FromStep = 0,
    to_step: ToStep = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Summaries per page.")] = 100,
    cursor: Cursor = None,
) -> Page[HookSampleView]:
    """The stored hook summaries outside abandoned branches, oldest step first. Long histories are thinned. A page ends early
    after about 4 MiB."""
    with service.database.read() as session:
        steps = metrics.StepRange(from_step, to_step)
        return metrics.hook_history(session, job_id, rank, limit, cursor, max_points, steps)


@router.get("/v1/jobs/{job_id}/trackers", dependencies=[needs(Scope.JOBS_READ)], summary="Runs in experiment trackers")
def list_trackers(service: ServiceDep, job_id: str) -> Page[TrackerView]:
    """The job's runs in all trackers on one page; none before it trains."""
    with service.database.read() as session:
        return trackers.list_trackers(session, job_id)


@router.get("/v1/jobs/{job_id}/metrics", dependencies=[needs(Scope.JOBS_READ)], summary="Metrics over steps")
def get_metrics(
    service: ServiceDep,
    job_id: str,
    name: Annotated[list[_MaxName] | None, Query(description="Only these series; default: all.")] = None,
    max_points: Annotated[int, Query(ge=2, le=10_000, description="Points per series.")] = 1000,
    from_step: FromStep = 0,
    to_step: ToStep = None,
) -> MetricsView:
    """The job's metric series. A series with more points in the range of steps is thinned to evenly spaced ones. Points of
    repeated steps replace the earlier ones."""
    with service.database.read() as session:
        return metrics.metrics(session, job_id, name or [], max_points, metrics.StepRange(from_step, to_step))


_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {dependencies.EVENTS: {"schema": {"type": "string"}}},
        "description": "A page, or a stream of events.",
    }
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
    attempt: Annotated[
        int | None,
        Query(ge=0, le=2**31 - 1, description="With a page: only events of this attempt; 0: those of no attempt."),
    ] = None,
    type: Annotated[
        list[Annotated[str, Query(max_length=100)]] | None,
        Query(max_length=64, description="With a page: only events of any of these types."),
    ] = None,
    sort: Annotated[
        job_history.EventSort,
        Query(description="`-id`: newest first. Only with a page: a stream has the oldest event first."),
    ] = "id",
    limit: Limit = 100,
    cursor: Cursor = None,
    accept: Annotated[str | None, Header()] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response | Page[EventView]:
    """The job's events, unless `sort` says otherwise oldest first: a page (JSON), or with `follow=true` or `Accept:
    text/event-stream` a stream of events. The stream begins after the event that `Last-Event-ID` names, and ends with `event:
    end` when the job has ended."""
    if (
        dependencies.negotiate_media_type(
            accept, [dependencies.EVENTS] if follow else [dependencies.JSON, dependencies.EVENTS]
        )
        == dependencies.JSON
    ):
        with service.database.read() as session:
            return job_history.list_events(session, job_id, limit, cursor, attempt, type or (), sort)
    if sort != "id":
        raise Refused(
            "sort=-id is for a page of JSON; a stream has the oldest event first: leave sort out, and send the id of the newest "
            "known event as Last-Event-ID",
            code="invalid-parameter",
        )
    _refuse_cursor(cursor)
    last = job_history.parse_last_id(last_event_id)
    with service.database.read() as session:
        find_job(session, job_id)

    def poll() -> PollResult:
        """Return the events after the last one, as chunks. Finished once the job has ended and no event is left, or it was
        deleted."""
        nonlocal last
        try:
            with service.database.read() as session:
                ended = find_job(session, job_id).phase.terminal
                found = job_history.events_after(session, job_id, last, _BATCH)
        except NotFound:
            return PollResult([], True)
        last = found[-1].id if found else last
        return PollResult([format_event(str(e.id), e.model_dump_json()) for e in found], ended and len(found) < _BATCH)

    return _stream(service, poll, dependencies.EVENTS)


_LOG_FORMS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            dependencies.TEXT: {"schema": {"type": "string"}},
            dependencies.NDJSON: {"schema": {"type": "string"}},
            dependencies.EVENTS: {"schema": {"type": "string"}},
        },
        "description": "A page of lines; all lines as text or as JSON lines; or a stream.",
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
    follow: Annotated[bool, Query(description="Follow the log as lines are written, later attempts included.")] = False,
    tail: Annotated[int | None, Query(ge=0, le=1_000_000, description="Only the last lines of each rank.")] = None,
    since: Annotated[
        datetime | None,
        Query(
            description="Only lines written since then, accurate to about six seconds; for a line without a time the last "
            "time in its log counts."
        ),
    ] = None,
    grep: Annotated[
        str | None, Query(max_length=1000, description="Only lines that contain this text (not a pattern).")
    ] = None,
    rank: Annotated[int | None, Query(ge=0, le=99_999)] = None,
    attempt: Annotated[
        str | None, Query(pattern=r"^(all|[1-9]\d{0,8})$", description="A number, or `all`; default: the newest.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Lines per page.")] = 1000,
    cursor: Cursor = None,
    accept: Annotated[str | None, Header()] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response | Page[LogLine]:
    """The lines of the ranks' logs. By Accept: a JSON page (default), `text/plain` or `application/x-ndjson` with all lines,
    `text/event-stream`.

    Plain text has `[attempt.rank]` before each line, unless `rank` is set. The middle of a log that is too long is dropped:
    one line in its place has the number of bytes (`left_out`). Searches return this line too. A page ends after 16 MiB of logs:
    a page of a search may have few lines or none, and a `next_cursor` all the same.
    """
    offers = (
        [dependencies.EVENTS, dependencies.TEXT, dependencies.NDJSON]
        if follow
        else [dependencies.JSON, dependencies.TEXT, dependencies.NDJSON, dependencies.EVENTS]
    )
    form = dependencies.negotiate_media_type(accept, offers)
    if since is not None and since.tzinfo is None:
        raise Refused("since needs a time zone, like 2026-01-31T12:00:00Z", code="invalid-parameter")
    with service.database.read() as session:
        newest = max(1, find_job(session, job_id).attempt)
        following = follow or form == dependencies.EVENTS  # then an attempt that is not there yet is waited for
        if not following and attempt not in (None, "all"):
            find_attempt(session, job_id, str(attempt))
    first, last = (newest, None if following else newest) if attempt is None else (1, None)
    if attempt not in (None, "all"):
        first = last = int(str(attempt))
    log_filter = LogFilter(first, last, rank, grep, since, tail)
    paths = service.settings.paths.job(job_id)
    if form == dependencies.JSON:
        return logs.page(paths, job_id, log_filter, limit, cursor)
    _refuse_cursor(cursor)
    write = _writer(form, prefix=rank is None)
    if not following:
        return StreamingResponse((write(line.id, line) for line in logs.read_lines(paths, log_filter)), media_type=form)
    follower = logs.Follower(paths, log_filter, last_event_id or None)

    def poll() -> PollResult:
        """Return the new lines as chunks. Finished once the job is over and no line is left."""
        ended = _has_ended(service, job_id)  # asked before the files are read, or a last line could be missed
        found = follower.poll(_BATCH, is_final=ended)
        return PollResult([write(mark, line) for mark, line in found], ended and len(found) < _BATCH)

    return _stream(service, poll, form)


def _writer(form: str, prefix: bool) -> Any:
    """Return the function that formats one line for ``form``. ``prefix``: put attempt and rank before plain text."""

    def text(_mark: str, line: LogLine) -> str:
        return f"[{line.attempt}.{line.rank}] {line.text}\n" if prefix else line.text + "\n"

    def json_line(_mark: str, line: LogLine) -> str:
        return line.model_dump_json() + "\n"

    def event(mark: str, line: LogLine) -> str:
        return format_event(mark, line.model_dump_json())

    return {dependencies.TEXT: text, dependencies.NDJSON: json_line, dependencies.EVENTS: event}[form]


def _has_ended(service: Service, job_id: str) -> bool:
    """Return True if the job has ended or does not exist any more."""
    try:
        with service.database.read() as session:
            return find_job(session, job_id).phase.terminal
    except NotFound:
        return True


def _refuse_cursor(cursor: str | None) -> None:
    """Raise ``Refused`` (``invalid-parameter``) if there is a cursor. Only for requests that are not for a JSON page."""
    if cursor is not None:
        raise Refused("a cursor pages through JSON; a stream continues after Last-Event-ID", code="invalid-parameter")


def _stream(service: Service, poll: Any, form: str) -> StreamingResponse:
    """Return a response in the media type ``form`` that sends the chunks of ``poll`` until its result is finished. A
    stream of events also ends when the service stops."""
    settings = service.settings
    events_form = form == dependencies.EVENTS
    chunks = follow(
        poll,
        interval_seconds=settings.follow_interval,
        keep_alive_seconds=settings.keep_alive_interval,
        keep_alive_text=_COMMENT if events_form else "",
        end_text=END if events_form else "",
        is_stopping=lambda: service.health.stopping,
    )
    return StreamingResponse(chunks, media_type=form, headers={"Cache-Control": "no-store"})
