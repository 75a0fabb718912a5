"""Waiting for a job, and watching it: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import queue
import shlex
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import typer

from ratchet_client.cli.commands import files
from ratchet_client.cli.commands.logs import ErrorsOnce, EventFold, event_line, print_disconnect
from ratchet_client.cli.commands.metrics import last_values_text
from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.exit_codes import Exit
from ratchet_client.cli.shared.job_figures import (
    Snapshot,
    SnapshotReader,
    checkpoint_text,
    eta_text,
    hook_text,
    snapshot_fields,
    speed_text,
)
from ratchet_client.cli.shared.options import PATIENCE, RETRY_FOR, open_client, reason_text, step_text
from ratchet_contract.phases import JobPhase, NoteType

if TYPE_CHECKING:
    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api.views import EventView, JobView

T = TypeVar("T")
_POLL_SECONDS = 0.5
_PLAIN_INTERVAL_SECONDS = 5.0


class View(Protocol):
    """A view of a job: ``pump`` calls it for each event, for each snapshot, and when the service stops responding."""

    def on_event(self, event: EventView) -> None: ...
    def on_progress(self, snapshot: Snapshot) -> None: ...
    def on_disconnect(self, detail: str) -> object: ...


def poll(
    fetch: Callable[[], T], interval_seconds: float, on_gap: Callable[[str], object] = print_disconnect
) -> Iterator[T]:
    """Yield the result of ``fetch`` every ``interval_seconds``, without an end. ``on_gap``: called with the error if the service
    stops responding after a first result; if it returns True, it is called again at the next failure. Raise
    ``ServiceUnreachable`` or ``ServiceFault`` if the service does not respond for too long. Raise it at once if another program
    responds, or if no service is found before the first result."""
    from ratchet_client.http.discovery import NEVER_STARTED
    from ratchet_client.resources.poll import Outage, retry_poll

    reported, reached = False, False
    for seen in retry_poll(fetch, PATIENCE, at_first=RETRY_FOR):
        if isinstance(seen, Outage):
            if not reached and seen.code == NEVER_STARTED:
                raise seen
            if reached and not reported:
                reported = not on_gap(seen.detail)
        else:
            reported, reached = False, True
            yield seen
        time.sleep(interval_seconds)


def wait(ctx: typer.Context, job_id: str, *, until: Collection[JobPhase] = (), deadline: float | None = None,
         as_json: bool = False) -> None:  # fmt: skip
    """Wait until the job has ended or is in a phase of ``until``, and print its changes on standard error. Then print the job as
    JSON if ``as_json`` is set, else the results of a job that has ended. Raise ``typer.Exit`` unless the job is in a phase of
    ``until`` (default: SUCCEEDED). Raise ``DeadlineReached`` after ``deadline`` seconds."""
    from ratchet_client.resources.client import TERMINAL

    once = ErrorsOnce()

    def print_change(job: JobView) -> None:
        """Print the phase of the job and the reason for it."""
        hint = f"; `ratchet resume {job.id}` continues it" if job.phase == "SUSPENDED" else ""
        told = client.attempt(job.id, job.attempt).message if job.message and job.attempt else None
        reason = once(reason_text(job), told)
        output.note(f"{job.phase}, {step_text(job)}{hint}" + (f": {reason}" if reason else ""))

    with open_client(ctx, PATIENCE if deadline is None else 1.0) as client:
        job = client.wait(job_id, until or TERMINAL, deadline, on_change=print_change)
        if job.phase.terminal and not as_json:
            for event in client.events(job.id, type=f"note.{NoteType.WORK_KEPT}"):
                output.note(event_line(event))
            _print_results(client, job)
        rank = _failed_rank(client, job)
    if as_json:
        output.emit(job)
    _exit_by_result(job, rank, until)


def _print_results(client: RatchetClient, job: JobView) -> None:
    """Print on standard error an ended job's last metrics, model (if it succeeded) and files, as far as it has them, each with a
    command to see more."""
    if words := last_values_text(client, job.id):
        output.note(f"last metrics: {words}; all: ratchet metrics {job.id}")
    if job.last_checkpoint is not None and job.phase == "SUCCEEDED":
        output.note(
            f"model: {job.last_checkpoint}; as a file: ratchet checkpoints export {job.id} -o model.safetensors"
        )
    files.print_outputs(client, job)


def _failed_rank(client: RatchetClient, job: JobView) -> int | None:
    """Return the rank whose failure ended the last attempt of a failed job; None if it is unknown or the job has not failed."""
    from ratchet_contract.errors import RatchetError

    with suppress(RatchetError):
        return client.attempt(job.id).rank if job.phase == "FAILED" and job.attempt else None
    return None


def _exit_by_result(job: JobView, rank: int | None, until: Collection[JobPhase] = ()) -> None:
    """Return if the job is in a phase of ``until`` (default: SUCCEEDED), else print helpful commands and raise ``typer.Exit``.
    ``rank``: the rank that failed."""
    if until and job.phase not in until:
        output.note(f"{job.id} ended as {job.phase} and will not be {', '.join(sorted(until))}")
    if job.phase not in (until or ("SUCCEEDED",)):
        of_rank = "" if rank is None else f" --rank {rank}"
        output.note(f"see: ratchet attempts {job.id}; ratchet logs {job.id}{of_rank}")
        if job.phase in ("FAILED", "CANCELLED") and "`ratchet " not in (
            job.message or ""
        ):  # the message already names a command
            output.note(_resume_hint(job))
        raise typer.Exit(Exit.JOB_FAILED)


def _resume_hint(job: JobView) -> str:
    """Return, as text, the commands that continue a failed or cancelled job, with the same and, if possible, with changed
    code."""
    again, code = f"ratchet resume {job.id}", job.spec.get("code")
    if code is None or code.get("source") == "nodes":
        return f"continue: {again}"
    if job.spec.get("determinism") == "strict" and job.last_checkpoint is not None:
        other = f"ratchet fork {job.id} --set determinism=warn --set code.path={shlex.quote(code['path'])}"
        return f"continue with the same code: {again}; with changed code, which strict refuses, as a new job: {other}"
    return f"continue with the same code: {again}; with changed code: {again} --code {shlex.quote(code['path'])}"


def follow(ctx: typer.Context, job_id: str, *, as_json: bool = False) -> None:
    """Show the job's events and progress until it has ended. Raise ``typer.Exit`` unless it succeeded. Ctrl-C ends only the
    view."""
    fold, after = EventFold(follow=True), None
    if not as_json:
        with open_client(ctx) as client:
            after = _event_before_newest_attempt(client, job_id)
        if after is not None:
            output.note(f"showing events from the newest attempt on; earlier ones: ratchet events {job_id}")
    try:
        if not as_json and output.on_terminal():
            from ratchet_client.cli.commands.live_view import LiveView

            with LiveView() as live:
                job = pump(ctx, job_id, live, fold, after=after)
        elif as_json:
            job = pump(ctx, job_id, _JsonView(), None)
        else:
            job = pump(ctx, job_id, PlainView(_print), fold, after=after)
    except KeyboardInterrupt:
        output.note(f"\ndetached; job {job_id} continues. Watch it again: ratchet wait {job_id} --follow")
        raise typer.Exit(Exit.INTERRUPTED) from None
    with open_client(ctx) as client:
        if as_json:
            output.emit_line({"job": job})
        else:
            output.line(
                f"{job.id} {job.phase}, {step_text(job)}"
                + (f": {fold.dedupe_errors(reason_text(job))}" if reason_text(job) else "")
            )
            _print_results(client, job)
        rank = _failed_rank(client, job)
    _exit_by_result(job, rank)


def _event_before_newest_attempt(client: RatchetClient, job_id: str) -> int | None:
    """Return the id after which the newest attempt's events begin; None if all events are to be shown."""
    newest = client.view(job_id).attempt
    first = next(client.events(job_id, attempt=newest, page_size=1), None) if newest > 1 else None
    return None if first is None else first.id - 1


def pump(
    ctx: typer.Context, job_id: str, view: View, fold: EventFold | None, *, after: int | None = None,
    until: Collection[JobPhase] = (), on_interrupt: Callable[[], object] = lambda: None,
) -> JobView:  # fmt: skip
    """Pass the job's events and snapshots to ``view`` until the job has ended or is in a phase of ``until``; return the job.
    ``after``: id of the last event not to show. ``on_interrupt``: called on Ctrl-C before anything is printed; then
    ``KeyboardInterrupt`` is raised."""
    arrived: queue.SimpleQueue[EventView | None] = queue.SimpleQueue()
    with open_client(ctx, 0.0) as client, open_client(ctx, PATIENCE) as streamer:
        thread = threading.Thread(target=_collect, args=(streamer, job_id, after, arrived), daemon=True)
        thread.start()
        lookout = SnapshotReader(client)
        try:
            for now in poll(lambda: lookout.read(client.view(job_id)), _POLL_SECONDS, view.on_disconnect):
                _drain(arrived, view, fold)
                if now.job.phase.terminal or now.job.phase in until:
                    break
                view.on_progress(now)
            thread.join(
                timeout=5.0 if now.job.phase.terminal else 0.5
            )  # a job in a phase of ``until`` may emit events forever
        except KeyboardInterrupt:
            # First: printing blocks while the terminal is paused.
            on_interrupt()
            raise
        finally:  # events that are held back are shown even on Ctrl-C
            _drain(arrived, view, fold)
            for event in fold.flush() if fold is not None else ():
                view.on_event(event)
        view.on_progress(now)
    return now.job


def _collect(
    client: RatchetClient, job_id: str, after: int | None, events: queue.SimpleQueue[EventView | None]
) -> None:
    """Put the job's events after the id ``after`` into ``events`` until the job has ended or the client fails, then None."""
    from ratchet_contract.errors import RatchetError

    try:
        for event in client.follow_events(job_id, after=after):
            events.put(event)
    except RatchetError:
        pass  # the polling loop gets the same error, and reports it
    finally:
        events.put(None)


def _drain(events: queue.SimpleQueue[EventView | None], view: View, fold: EventFold | None) -> None:
    """Pass all events that have arrived in the queue to ``view``, folded if ``fold`` is not None. Does not block."""
    while not events.empty():
        event = events.get()
        if event is not None:
            for shown in [event] if fold is None else fold.add(event):
                view.on_event(shown)


def _print(text: str) -> None:
    """Print one line on standard output and flush it."""
    output.line(text)
    output.flush()


class PlainView:
    """Prints events as they arrive, and changed progress lines at intervals. ``immediately``: the first progress line is not
    delayed by the interval."""

    def __init__(
        self,
        print_line: Callable[[str], None],
        interval_seconds: float = _PLAIN_INTERVAL_SECONDS,
        *,
        immediately: bool = True,
    ) -> None:
        self._print_line, self._interval_seconds = print_line, interval_seconds
        self._next = 0.0 if immediately else time.monotonic() + interval_seconds
        self._last = ""

    def on_event(self, event: EventView) -> None:
        self._print_line(event_line(event))

    def on_progress(self, snapshot: Snapshot) -> None:
        """Print a progress line, at most one per interval. When the job has ended, the interval is not awaited. No line is
        printed if nothing but the phase has changed."""
        if time.monotonic() < self._next and not snapshot.job.phase.terminal:
            return
        eta = eta_text(snapshot)
        parts = [
            step_text(snapshot.job),
            speed_text(snapshot.job.progress.steps_per_second),
            f"{eta} left" if eta else "",
        ]
        parts += ["" if snapshot.loss is None else f"loss {snapshot.loss:.4f}", hook_text(snapshot.hook)]
        parts += [f"checkpoint {checkpoint_text(snapshot)}" if snapshot.job.last_checkpoint else ""]
        text = "; ".join(part for part in parts if part)
        if text != self._last:
            self._print_line(f"{snapshot.job.phase}  {text}")
        self._last, self._next = text, time.monotonic() + self._interval_seconds

    def on_disconnect(self, detail: str) -> bool:
        """Print the error ``detail``. Return False, so that further failures are not passed until the service responds again."""
        print_disconnect(detail)
        return False


class _JsonView:
    """Prints ``{"event": ...}`` and ``{"progress": ...}`` as lines of JSON; progress only if it has changed."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def on_event(self, event: EventView) -> None:
        output.emit_line({"event": event})

    def on_progress(self, snapshot: Snapshot) -> None:
        """Print the job's figures if they have changed since the last call."""
        data = snapshot_fields(snapshot)
        if data != self._last:
            output.emit_line({"progress": data})
        self._last = data

    def on_disconnect(self, detail: str) -> None:
        print_disconnect(detail)
