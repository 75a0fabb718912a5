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

from ratchet_client.cli import files, output
from ratchet_client.cli.common import PATIENCE, RETRY_FOR, open_client, steps_words, why
from ratchet_client.cli.exits import Exit
from ratchet_client.cli.figures import (
    Lookout,
    Snapshot,
    checkpoint_words,
    eta_words,
    facts,
    hook_words,
    speed_words,
)
from ratchet_client.cli.metrics import last_words
from ratchet_client.cli.streams import ErrorsOnce, EventFold, event_line, say_gap

if TYPE_CHECKING:
    from ratchet_client.client import RatchetClient
    from ratchet_contract.api import EventView, JobView
    from ratchet_contract.phases import JobPhase

T = TypeVar("T")
_POLL = 0.5
_PLAIN_EVERY = 5.0


class View(Protocol):
    def event(self, event: EventView) -> None: ...
    def progress(self, now: Snapshot) -> None: ...
    def gap(self, detail: str) -> None: ...


def polled(look: Callable[[], T], every: float, on_gap: Callable[[str], None] = say_gap) -> Iterator[T]:
    """What ``look`` sees, every ``every`` seconds. A service that goes away is waited for ``PATIENCE`` seconds, and ``on_gap`` is
    told once; then, and soon where nothing ever answered, ``ServiceUnreachable``."""
    from ratchet_client.discovery import NEVER_STARTED
    from ratchet_client.errors import ServiceUnreachable
    from ratchet_client.polling import tries

    away, reached = False, False
    for seen in tries(look, PATIENCE, at_first=RETRY_FOR):
        if isinstance(seen, ServiceUnreachable):
            if not reached and seen.code == NEVER_STARTED:
                raise seen
            if reached and not away:
                on_gap(seen.detail)
            away = True
        else:
            away, reached = False, True
            yield seen
        time.sleep(every)


def wait(ctx: typer.Context, job_id: str, *, until: Collection[JobPhase] = (), deadline: float | None = None,
         as_json: bool = False) -> None:  # fmt: skip
    """Wait quietly; ends the command with the code of how the job ended."""
    from ratchet_client.client import TERMINAL

    once = ErrorsOnce()

    def tell(job: JobView) -> None:
        hint = f"; `ratchet resume {job.id}` lets it go on" if job.phase == "SUSPENDED" else ""
        told = client.attempt(job.id, job.attempt).message if job.message and job.attempt else None
        reason = once(why(job), told)
        output.note(f"{job.phase}, {steps_words(job)}{hint}" + (f": {reason}" if reason else ""))

    with open_client(ctx, PATIENCE if deadline is None else 1.0) as client:
        job = client.wait(job_id, until or TERMINAL, deadline, on_change=tell)
        if job.phase.terminal and not as_json:
            for event in client.events(job.id, type="note.work-kept"):
                output.note(event_line(event))
            _tell_end(client, job)
        rank = _failed_rank(client, job)
    if as_json:
        output.emit(job)
    _end(job, rank, until)


def _tell_end(client: RatchetClient, job: JobView) -> None:
    """On stderr, what came of a job that has ended, and where it is."""
    if words := last_words(client, job.id):
        output.note(f"last metrics: {words}; all: ratchet metrics {job.id}")
    if job.last_checkpoint is not None and job.phase == "SUCCEEDED":
        output.note(
            f"model: {job.last_checkpoint}; as a file: ratchet checkpoints export {job.id} -o model.safetensors"
        )
    files.tell(client, job)


def _failed_rank(client: RatchetClient, job: JobView) -> int | None:
    """The rank that ended the last attempt of a job that failed: what the others say in their logs follows from it."""
    from ratchet_contract.errors import RatchetError

    with suppress(RatchetError):
        return client.attempt(job.id).rank if job.phase == "FAILED" and job.attempt else None
    return None


def _end(job: JobView, rank: int | None, until: Collection[JobPhase] = ()) -> None:
    if until and job.phase not in until:
        output.note(f"{job.id} ended as {job.phase} and will not be {', '.join(sorted(until))}")
    if job.phase not in (until or ("SUCCEEDED",)):
        of_rank = "" if rank is None else f" --rank {rank}"
        output.note(f"see: ratchet attempts {job.id}; ratchet logs {job.id}{of_rank}")
        if job.phase in ("FAILED", "CANCELLED") and "`ratchet " not in (job.message or ""):  # it names a command itself
            output.note(_go_on(job))
        raise typer.Exit(Exit.JOB_FAILED)


def _go_on(job: JobView) -> str:
    """The commands that let an ended job go on. Without ``--code`` it runs the snapshot that it has."""
    again, code = f"ratchet resume {job.id}", job.spec.get("code")
    if code is None or code.get("source") == "nodes":
        return f"go on: {again}"
    if job.spec.get("determinism") == "strict" and job.last_checkpoint is not None:
        other = f"ratchet fork {job.id} --set determinism=warn --set code.path={shlex.quote(code['path'])}"
        return f"go on with the same code: {again}; with changed code, which strict refuses, as a new job: {other}"
    return f"go on with the same code: {again}; with changed code: {again} --code {shlex.quote(code['path'])}"


def follow(ctx: typer.Context, job_id: str, *, as_json: bool = False) -> None:
    """Watch until the job has ended. Ctrl-C detaches: the job goes on, the exit code is 130. The history of earlier attempts is
    left out, but for ``as_json``."""
    fold, after = EventFold(follow=True), None
    if not as_json:
        with open_client(ctx) as client:
            after = _before_newest(client, job_id)
        if after is not None:
            output.note(f"from the newest attempt on; what was before it: ratchet events {job_id}")
    try:
        if not as_json and output.on_terminal():
            from ratchet_client.cli.live import LiveView

            with LiveView() as live:
                job = pump(ctx, job_id, live, fold, after=after)
        elif as_json:
            job = pump(ctx, job_id, _JsonView(), None)
        else:
            job = pump(ctx, job_id, PlainView(_print), fold, after=after)
    except KeyboardInterrupt:
        output.note(f"\ndetached; job {job_id} goes on. Watch it again: ratchet wait {job_id} --follow")
        raise typer.Exit(Exit.INTERRUPTED) from None
    with open_client(ctx) as client:
        if as_json:
            output.emit_line({"job": job})
        else:
            output.line(f"{job.id} {job.phase}, {steps_words(job)}" + (f": {fold.once(why(job))}" if why(job) else ""))
            _tell_end(client, job)
        rank = _failed_rank(client, job)
    _end(job, rank)


def _before_newest(client: RatchetClient, job_id: str) -> int | None:
    """Id of the last that is not shown: all before the first event of the newest attempt. None where no attempt was before it."""
    newest = client.view(job_id).attempt
    first = next(client.events(job_id, attempt=newest, page_size=1), None) if newest > 1 else None
    return None if first is None else first.id - 1


def pump(
    ctx: typer.Context, job_id: str, view: View, fold: EventFold | None, *, after: int | None = None,
    until: Collection[JobPhase] = (), interrupted: Callable[[], object] = lambda: None,
) -> JobView:  # fmt: skip
    """Feed a view with events (from a thread that follows them; folded, where ``fold`` is given) and snapshots until the job has
    ended, or is in a phase of ``until``, and all is shown. ``after``: the id of the last event that is not shown.
    ``interrupted``: called at ^C before another word is shown, which a terminal that is held may hold up."""
    arrived: queue.SimpleQueue[EventView | None] = queue.SimpleQueue()
    with open_client(ctx, 0.0) as client, open_client(ctx, PATIENCE) as streamer:
        thread = threading.Thread(target=_collect, args=(streamer, job_id, after, arrived), daemon=True)
        thread.start()
        lookout = Lookout(client)
        try:
            for now in polled(lambda: lookout.see(client.view(job_id)), _POLL, view.gap):
                _drain(arrived, view, fold)
                if now.job.phase.terminal or now.job.phase in until:
                    break
                view.progress(now)
            thread.join(timeout=5.0 if now.job.phase.terminal else 0.5)  # else events may follow for ever
        except KeyboardInterrupt:
            interrupted()
            raise
        finally:  # ^C holds nothing back
            _drain(arrived, view, fold)
            for event in fold.rest() if fold is not None else ():
                view.event(event)
        view.progress(now)
    return now.job


def _collect(
    client: RatchetClient, job_id: str, after: int | None, arrived: queue.SimpleQueue[EventView | None]
) -> None:
    from ratchet_contract.errors import RatchetError

    try:
        for event in client.follow_events(job_id, after=after):
            arrived.put(event)
    except RatchetError:
        pass  # the polling side meets the same fault, and reports it
    finally:
        arrived.put(None)


def _drain(arrived: queue.SimpleQueue[EventView | None], view: View, fold: EventFold | None) -> None:
    while not arrived.empty():
        event = arrived.get()
        if event is not None:
            for shown in [event] if fold is None else fold.add(event):
                view.event(shown)


def _print(text: str) -> None:
    output.line(text)
    output.flush()


class PlainView:
    """Events as they come; a progress line every few seconds. ``say`` prints a line. ``at_once``: the first of them, too."""

    def __init__(self, say: Callable[[str], None], every: float = _PLAIN_EVERY, *, at_once: bool = True) -> None:
        self._say, self._every = say, every
        self._next = 0.0 if at_once else time.monotonic() + every
        self._last = ""

    def event(self, event: EventView) -> None:
        self._say(event_line(event))

    def progress(self, now: Snapshot) -> None:
        if time.monotonic() < self._next and not now.job.phase.terminal:
            return
        eta = eta_words(now)
        parts = [steps_words(now.job), speed_words(now.job.progress.steps_per_second), f"{eta} left" if eta else ""]
        parts += ["" if now.loss is None else f"loss {now.loss:.4f}", hook_words(now.hook)]
        parts += [f"checkpoint {checkpoint_words(now)}" if now.job.last_checkpoint else ""]
        text = "; ".join(part for part in parts if part)
        if text != self._last:
            self._say(f"{now.job.phase}  {text}")
        self._last, self._next = text, time.monotonic() + self._every

    def gap(self, detail: str) -> None:
        say_gap(detail)


class _JsonView:
    """``{"event": ...}`` and ``{"progress": ...}`` lines."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def event(self, event: EventView) -> None:
        output.emit_line({"event": event})

    def progress(self, now: Snapshot) -> None:
        data = facts(now)
        if data != self._last:
            output.emit_line({"progress": data})
        self._last = data

    def gap(self, detail: str) -> None:
        say_gap(detail)
