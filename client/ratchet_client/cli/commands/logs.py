"""``ratchet logs`` and ``ratchet events``: print what is stored, or follow what arrives (``-f``)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import LOOK, PATIENCE, RETRY_FOR, JsonFlag, ReadJobId, open_client, parse_time
from ratchet_contract.phases import EventType
from ratchet_contract.plural import pluralize, short_digests

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ratchet_client.resources.client import RatchetClient, WhichAttempt
    from ratchet_contract.api import views

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")]


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
            help="Only lines since then, to about 6 s: 30s, 10m, 2h, 1d, or 2026-01-31T12:00:00Z.",
        ),
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option(
            min=0, help="Only this many last lines of each rank; with --attempt all, of each rank and attempt."
        ),
    ] = None,
    grep: Annotated[str | None, typer.Option(help="Only lines that contain this text.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Print the ranks' output, each line prefixed with attempt and rank. Logs remain after service and worker have ended."""
    which, begin = _parse_attempt(attempt), parse_time(since, "--since")
    with open_client(ctx, PATIENCE if follow else RETRY_FOR) as client:
        if rank and which is None:
            _check_rank(client, job, rank)
        lines: Iterable[views.LogLine]
        if follow:
            lines = client.follow_logs(
                job, rank=rank, attempt=which, tail=tail, grep=grep, since=begin, on_gap=print_disconnect
            )
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
            output.note(_no_lines_message(client, job, rank, which, is_unfiltered=(begin, grep) == (None, None)))


def _no_lines_message(
    client: RatchetClient, job: str, rank: int | None, attempt: WhichAttempt | None, *, is_unfiltered: bool
) -> str:
    """Return the message for a command that printed no line. ``is_unfiltered``: neither ``--since`` nor ``--grep`` was set."""
    who = "it" if rank is None else f"rank {rank}"
    text = f"{who} has printed nothing" if is_unfiltered else "no such line"
    newest = client.view(job).attempt
    if attempt is None and newest > 1:
        return f"{text} in attempt {newest}, the newest; --attempt all includes the earlier ones"
    return text


def _check_rank(client: RatchetClient, job: str, rank: int) -> None:
    """Raise ``typer.BadParameter`` if the number ``rank`` is too large for the job and no attempt has a log of that rank."""
    view = client.view(job)
    world = view.spec.get("world", {})
    ranks = world.get("nodes", 1) * world.get("ranks_per_node", 1)
    if rank >= ranks and next(client.logs(job, rank=rank, attempt="all", tail=1), None) is None:
        raise typer.BadParameter(f"--rank {rank}: {job} has {pluralize(ranks, 'rank')}, from 0 on")


def _parse_attempt(attempt: str | None) -> WhichAttempt:
    """Return the attempt that ``--attempt`` selects: a number, "all", or None for the newest. Raise ``typer.BadParameter`` for
    any other value."""
    if attempt is None or attempt == "all":
        return "all" if attempt else None
    if not attempt.isascii() or not attempt.isdigit() or int(attempt) < 1:
        raise typer.BadParameter(f"--attempt takes a number from 1 on, or all, not {attempt!r}")
    return int(attempt)


def events(
    ctx: typer.Context,
    job: ReadJobId,
    follow: Follow = False,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="Print each event separately: every checkpoint, and every event of an attempt's end."
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Print the events of a job, oldest first.

    Consecutive checkpoints are combined into one line, and so are the events of an attempt's end. With --follow the first
    checkpoint is printed at once, and the combined line when another event occurs. With --json each event is printed separately.
    """
    with open_client(ctx, PATIENCE if follow else RETRY_FOR) as client:
        found: Iterable[views.EventView] = (
            client.follow_events(job, on_gap=print_disconnect) if follow else client.events(job)
        )
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
        finally:  # events that are held back are printed even on Ctrl-C, or if the service is gone
            _print(fold.flush())


def _print(events: Iterable[views.EventView]) -> None:
    """Print one line per event, and flush."""
    for event in events:
        output.line(event_line(event))
    output.flush()


class ErrorsOnce:
    """Shortens texts that repeat an error. Call the object with each text in turn: where a text repeats an error of an earlier
    text, ``(as above)`` replaces the error."""

    def __init__(self) -> None:
        self._printed: list[str] = []

    def __call__(self, text: str, error: str | None = None) -> str:
        """Return ``text`` with the errors of earlier texts, except short ones, replaced. ``error``: a message that may occur in
        ``text`` and in later texts."""
        for shown in self._printed:
            text = re.sub(rf"{re.escape(shown)}(?!\w)", "(as above)", text)  # step 34 is not step 340
        told = (
            (error or "").partition("; process groups ")[0].rstrip(".")
        )  # the list of ranks that aborted theirs may vary
        if len(told) > 20 and told in text:  # a shorter one may occur in any text, and takes little space
            self._printed.append(told)
        return text


class EventFold:
    """Combines events that belong together, as they arrive: consecutive checkpoints, and the events of an attempt's end.
    ``follow``: show the first checkpoint of a series at once."""

    def __init__(self, follow: bool = False) -> None:
        self.dedupe_errors = ErrorsOnce()
        self._follow = follow
        self._checkpoints: list[views.EventView] = []
        self._results: list[views.EventView] = []
        self._ended: views.EventView | None = None

    def add(self, event: views.EventView) -> list[views.EventView]:
        """Return the events to show now that ``event`` has arrived; may include earlier events. ``event`` may be held back until
        a later call or ``flush``, combined with others, or omitted."""
        if event.type == EventType.RESULT:
            self._results.append(event)
            return []
        run = self._checkpoints
        if event.type == EventType.CHECKPOINT and self._ended is None and (not run or run[-1].attempt == event.attempt):
            run.append(event)
            return [event] if self._follow and len(run) == 1 else []
        ended, shown = self._ended, self._fold_checkpoints()
        self._ended, self._checkpoints = None, [event] if event.type == EventType.CHECKPOINT else []
        if ended is not None and event.type.startswith("end-"):
            return [*shown, self._merge_end(ended, event)]
        shown += [ended] if ended is not None else []
        if event.type == EventType.ATTEMPT_ENDED:
            self._ended = event
            self._results = [result for result in self._results if result.attempt != event.attempt]
            return shown
        return shown if event.type == EventType.CHECKPOINT and not self._follow else [*shown, event]

    def flush(self) -> list[views.EventView]:
        """Return the events that are still held back. Called once, after the last event has arrived."""
        return [*self._fold_checkpoints(), *self._results, *([] if self._ended is None else [self._ended])]

    def _fold_checkpoints(self) -> list[views.EventView]:
        """Return the checkpoint events that are held back; several are combined into one event. With ``follow`` a single one is
        left out, since it has already been shown."""
        run = self._checkpoints
        if len(run) < 2:
            return [] if self._follow else list(run)
        first, last = run[0].data.get("step"), run[-1]
        words = f"{len(run)} checkpoints from step {first} on, newest: {last.message.removeprefix('checkpoint ')}"
        return [last.model_copy(update={"message": words})]

    def _merge_end(self, ended: views.EventView, change: views.EventView) -> views.EventView:
        """Return the event ``ended``, combined with the job's transition ``change``; repeated text is omitted."""
        said = ended.message.partition(": ")[2].rstrip(".")
        more = change.message.replace(f"The last attempt ended with {said}.", "").strip()
        if more in ended.message or more == f"{change.data.get('from')} -> {change.data.get('to')}":
            more = ""
        more = " ".join(more.split())
        words = f"{ended.message.rstrip('.')}; the job is {change.data.get('to')}" + (f": {more}" if more else "")
        words = self.dedupe_errors(words, said.partition(": ")[2])
        return ended.model_copy(update={"message": words, "data": ended.data | change.data})


def event_line(event: views.EventView) -> str:
    """Return the event as a line of text: time, type, attempt if any, and message. Digests in the message are shortened."""
    attempt = f"attempt {event.attempt}"
    prefix = "" if event.attempt is None or event.message.startswith(attempt) else f"{attempt}: "
    return f"{output.format_time(event.at)}  {event.type:<20}  {prefix}{short_digests(event.message)}"


def print_disconnect(detail: str) -> None:
    """Print on standard error that the service does not respond (``detail``: the error) and that the command retries."""
    output.note(f"{detail}. Retrying; training continues without the service.")
