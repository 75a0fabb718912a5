"""``ratchet logs`` and ``ratchet events``: what is there, or what comes (``-f``)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli import output
from ratchet_client.cli.common import LOOK, PATIENCE, RETRY_FOR, JobId, JsonFlag, open_client

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratchet_client.client import WhichAttempt
    from ratchet_contract import api

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def register(app: typer.Typer) -> None:
    for command in (logs, events):
        app.command(rich_help_panel=LOOK)(command)


def logs(
    ctx: typer.Context,
    job: JobId,
    follow: Follow = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only this rank.")] = None,
    attempt: Annotated[
        str | None, typer.Option(metavar="N|all", help="This attempt, or all of them. (default: the newest)")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="AGE|TIME",
            help="Only logs written to since then, whole (lines carry no time): 30s, 10m, 2h, 1d, or 2026-01-31T12:00:00Z.",
        ),
    ] = None,
    tail: Annotated[int | None, typer.Option(min=0, help="Only the last lines of each rank.")] = None,
    grep: Annotated[str | None, typer.Option(help="Only lines with this text.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the ranks' output, each line with attempt and rank before it. Logs stay when service and worker are gone."""
    which, begin = _which(attempt), None if since is None else moment_of(since)
    with open_client(ctx, PATIENCE if follow else RETRY_FOR) as client:
        lines: Iterable[api.LogLine]
        if follow:
            lines = client.follow_logs(job, rank=rank, attempt=which, tail=tail, grep=grep, since=begin, on_gap=say_gap)
        else:
            lines = client.logs(job, rank=rank, attempt=which, tail=tail, grep=grep, since=begin)
        if as_json and not follow:
            output.emit(list(lines))
            return
        found = False
        for entry in lines:
            found = True
            if as_json:
                output.emit_line(entry)
            else:
                output.line(f"{entry.attempt}.{entry.rank} | {entry.text}")
                output.flush()
    if not found:
        output.note(
            f"no such line; `ratchet attempts {job}` shows the attempts, --attempt all takes the earlier ones too"
        )


def _which(attempt: str | None) -> WhichAttempt:
    if attempt is None or attempt == "all":
        return "all" if attempt else None
    if not attempt.isascii() or not attempt.isdigit() or int(attempt) < 1:
        raise typer.BadParameter(f"--attempt takes a number from 1 on, or all, not {attempt!r}")
    return int(attempt)


def moment_of(text: str, now: datetime | None = None) -> str:
    """RFC 3339, from an age like ``10m`` or such a time itself. Raises ``typer.BadParameter``."""
    number, unit = text[:-1], text[-1:]
    try:
        if unit in _UNITS and number.isascii() and number.replace(".", "", 1).isdigit():
            return ((now or datetime.now(UTC)) - timedelta(seconds=float(number) * _UNITS[unit])).isoformat()
        at = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        at = None
    if at is None or at.tzinfo is None:
        raise typer.BadParameter(
            f"--since takes an age like 10m, 2h, 1d or a time like 2026-01-31T12:00:00Z, not {text!r}"
        )
    return at.isoformat()


def events(ctx: typer.Context, job: JobId, follow: Follow = False, as_json: JsonFlag = False) -> None:
    """Print what happened to a job, oldest first."""
    with open_client(ctx, PATIENCE if follow else RETRY_FOR) as client:
        found: Iterable[api.EventView] = client.follow_events(job, on_gap=say_gap) if follow else client.events(job)
        if as_json and not follow:
            output.emit(list(found))
            return
        for event in found:
            if as_json:
                output.emit_line(event)
            else:
                output.line(event_line(event))
                output.flush()


def event_line(event: api.EventView) -> str:
    attempt = f"attempt {event.epoch}"
    prefix = "" if event.epoch is None or event.message.startswith(attempt) else f"{attempt}: "
    return f"{output.moment(event.at)}  {event.type:<20}  {prefix}{event.message}"


def say_gap(detail: str) -> None:
    output.note(f"{detail}. Still trying; training goes on without the service.")
