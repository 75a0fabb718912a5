"""``ratchet logs`` and ``ratchet events``: what is there, or what comes (``-f``)."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli import output
from ratchet_client.cli.common import LOOK, PATIENCE, RETRY_FOR, JsonFlag, ReadJobId, open_client
from ratchet_contract.plural import counted, short_digests

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratchet_client.client import RatchetClient, WhichAttempt
    from ratchet_contract import api

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")]
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def register(app: typer.Typer) -> None:
    for command in (logs, events):
        app.command(rich_help_panel=LOOK)(command)


def logs(
    ctx: typer.Context,
    job: ReadJobId,
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
    tail: Annotated[
        int | None,
        typer.Option(min=0, help="Only the last lines of each rank, and with --attempt all of each attempt."),
    ] = None,
    grep: Annotated[str | None, typer.Option(help="Only lines with this text.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the ranks' output, each line with attempt and rank before it. Logs stay when service and worker are gone."""
    which, begin = _which(attempt), None if since is None else moment_of(since)
    with open_client(ctx, PATIENCE if follow else RETRY_FOR) as client:
        if rank and which is None:
            _check_rank(client, job, rank)
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
            output.note(_nothing(client, job, rank, which, any_line=(begin, grep) == (None, None)))


def _nothing(client: RatchetClient, job: str, rank: int | None, attempt: WhichAttempt | None, *, any_line: bool) -> str:
    """Why no line is printed. ``any_line``: all lines were asked for."""
    who = "it" if rank is None else f"rank {rank}"
    text = f"{who} has printed nothing" if any_line else "no such line"
    newest = client.view(job).attempt
    if attempt is None and newest > 1:
        return f"{text} in attempt {newest}, the newest; --attempt all takes the earlier ones, too"
    return text


def _check_rank(client: RatchetClient, job: str, rank: int) -> None:
    """Raises ``typer.BadParameter`` for one that neither the job nor any attempt of it has or had."""
    view = client.view(job)
    world = view.spec.get("world", {})
    ranks = world.get("nodes", 1) * world.get("ranks_per_node", 1)
    if rank >= ranks and next(client.logs(job, rank=rank, attempt="all", tail=1), None) is None:
        raise typer.BadParameter(f"--rank {rank}: {job} has {counted(ranks, 'rank')}, from 0 on")


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


def events(
    ctx: typer.Context,
    job: ReadJobId,
    follow: Follow = False,
    every: Annotated[
        bool, typer.Option("--all", help="Print each event: every checkpoint, and all that an end consists of.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print what happened to a job, oldest first.

    Checkpoints in a row are one line, and so is the end of an attempt. With --follow the first of them is printed at once, and
    the line for all once something else happens. With --json each event is printed.
    """
    with open_client(ctx, PATIENCE if follow else RETRY_FOR) as client:
        found: Iterable[api.EventView] = client.follow_events(job, on_gap=say_gap) if follow else client.events(job)
        if as_json and not follow:
            output.emit(list(found))
            return
        fold = EventFold(follow)
        try:
            for event in found:
                if as_json:
                    output.emit_line(event)
                else:
                    _print([event] if every else fold.add(event))
        finally:  # ^C and a service that is gone hold nothing back
            _print(fold.rest())


def _print(events: Iterable[api.EventView]) -> None:
    for event in events:
        output.line(event_line(event))
    output.flush()


class ErrorsOnce:
    """Shows the text of an error in full the first time, and ``(as above)`` from then on."""

    def __init__(self) -> None:
        self._shown: list[str] = []

    def __call__(self, text: str, error: str | None = None) -> str:
        """``error``: the message of an attempt that has ended, which is looked for in ``text``."""
        for shown in self._shown:
            text = re.sub(rf"{re.escape(shown)}(?!\w)", "(as above)", text)  # step 34 is not step 340
        told = (error or "").partition("; process groups ")[0].rstrip(".")  # which ranks aborted theirs may differ
        if len(told) > 20 and told in text:  # shorter ones may be in any text, and are soon said
            self._shown.append(told)
        return text


class EventFold:
    """Folds events as they come. The end of an attempt is three of them: ``result`` (its agent's), ``attempt-ended`` and, right
    behind it, the change of the job (``end-requeue``, say). An error's text is in the first end that has it. With ``follow`` the
    first checkpoint of a run is shown when it comes."""

    def __init__(self, follow: bool = False) -> None:
        self.once = ErrorsOnce()
        self._follow = follow
        self._checkpoints: list[api.EventView] = []
        self._results: list[api.EventView] = []
        self._ended: api.EventView | None = None

    def add(self, event: api.EventView) -> list[api.EventView]:
        """What is to be shown now that ``event`` has come."""
        if event.type == "result":
            self._results.append(event)
            return []
        run = self._checkpoints
        if event.type == "checkpoint" and self._ended is None and (not run or run[-1].attempt == event.attempt):
            run.append(event)
            return [event] if self._follow and len(run) == 1 else []
        ended, shown = self._ended, self._run()
        self._ended, self._checkpoints = None, [event] if event.type == "checkpoint" else []
        if ended is not None and event.type.startswith("end-"):
            return [*shown, self._end(ended, event)]
        shown += [ended] if ended is not None else []
        if event.type == "attempt-ended":
            self._ended = event
            self._results = [result for result in self._results if result.attempt != event.attempt]
            return shown
        return shown if event.type == "checkpoint" and not self._follow else [*shown, event]

    def rest(self) -> list[api.EventView]:
        """What is still held back at the end of the history."""
        return [*self._run(), *self._results, *([] if self._ended is None else [self._ended])]

    def _run(self) -> list[api.EventView]:
        run = self._checkpoints
        if len(run) < 2:
            return [] if self._follow else list(run)
        first, last = run[0].data.get("step"), run[-1]
        words = f"{len(run)} checkpoints from step {first} on, newest: {last.message.removeprefix('checkpoint ')}"
        return [last.model_copy(update={"message": words})]

    def _end(self, ended: api.EventView, change: api.EventView) -> api.EventView:
        """``attempt-ended`` with what became of the job. The job's message repeats the attempt's; that part is left out."""
        said = ended.message.partition(": ")[2].rstrip(".")
        more = change.message.replace(f"The last attempt ended with {said}.", "").strip()
        if more in ended.message or more == f"{change.data.get('from')} -> {change.data.get('to')}":
            more = ""
        more = " ".join(more.split())
        words = f"{ended.message.rstrip('.')}; the job is {change.data.get('to')}" + (f": {more}" if more else "")
        words = self.once(words, said.partition(": ")[2])
        return ended.model_copy(update={"message": words, "data": ended.data | change.data})


def event_line(event: api.EventView) -> str:
    attempt = f"attempt {event.attempt}"
    prefix = "" if event.attempt is None or event.message.startswith(attempt) else f"{attempt}: "
    return f"{output.moment(event.at)}  {event.type:<20}  {prefix}{short_digests(event.message)}"


def say_gap(detail: str) -> None:
    output.note(f"{detail}. Still trying; training goes on without the service.")
