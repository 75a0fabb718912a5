"""Waiting for a job, and watching it: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import typer

from ratchet_client.cli import output
from ratchet_client.cli.common import open_client, steps, why
from ratchet_client.cli.exits import Exit
from ratchet_client.cli.streams import event_line, say_gap

if TYPE_CHECKING:
    from ratchet_client.client import RatchetClient
    from ratchet_contract.api import EventView, HookView, JobView
    from ratchet_contract.phases import JobPhase

_PATIENCE = 120.0
_POLL = 0.5
_PLAIN_EVERY = 5.0


@dataclass(frozen=True)
class Snapshot:
    """What the views show; ``loss`` is the newest value of the series ``loss``, or None."""

    job: JobView
    hook: HookView | None
    loss: float | None


class View(Protocol):
    def event(self, event: EventView) -> None: ...
    def progress(self, now: Snapshot) -> None: ...


def wait(ctx: typer.Context, job_id: str, *, until: Collection[JobPhase] = (), deadline: float | None = None,
         as_json: bool = False) -> None:  # fmt: skip
    """Wait quietly; ends the command with the code of how the job ended."""
    from ratchet_client.client import TERMINAL

    def tell(job: JobView) -> None:
        hint = f"; `ratchet resume {job.id}` lets it go on" if job.phase == "SUSPENDED" else ""
        output.note(f"{job.phase}, step {steps(job)}{hint}" + (f": {why(job)}" if why(job) else ""))

    with open_client(ctx, _PATIENCE if deadline is None else 1.0) as client:
        job = client.wait(job_id, until or TERMINAL, deadline, on_change=tell)
    if as_json:
        output.emit(job)
    _end(job, until)


def _end(job: JobView, until: Collection[JobPhase] = ()) -> None:
    if until and job.phase not in until:
        output.note(f"{job.id} ended as {job.phase} and will not be {', '.join(sorted(until))}")
    if job.phase not in (until or ("SUCCEEDED",)):
        raise typer.Exit(Exit.JOB_FAILED)


def follow(ctx: typer.Context, job_id: str, *, as_json: bool = False) -> None:
    """Watch until the job has ended. Ctrl-C detaches: the job goes on, the exit code is 130."""
    try:
        if not as_json and output.on_terminal():
            from ratchet_client.cli.live import LiveView

            with LiveView() as live:
                job = _pump(ctx, job_id, live)
        else:
            job = _pump(ctx, job_id, _JsonView() if as_json else _PlainView())
    except KeyboardInterrupt:
        output.note(f"\ndetached; job {job_id} goes on. Watch it again: ratchet wait {job_id} --follow")
        raise typer.Exit(Exit.INTERRUPTED) from None
    if as_json:
        output.emit_line({"job": job})
    else:
        output.line(f"{job.id} {job.phase} at step {steps(job)}" + (f": {why(job)}" if why(job) else ""))
    _end(job)


def _pump(ctx: typer.Context, job_id: str, view: View) -> JobView:
    """Feed a view with events (from a thread that follows them) and snapshots until the job has ended and all is shown."""
    arrived: queue.SimpleQueue[EventView | None] = queue.SimpleQueue()
    with open_client(ctx, 0.0) as client, open_client(ctx, _PATIENCE) as streamer:
        client.job(job_id)  # an unknown id ends here
        thread = threading.Thread(target=_collect, args=(streamer, job_id, arrived), daemon=True)
        thread.start()
        job = _until_ended(client, job_id, view, arrived)
        thread.join(timeout=5.0)
        _drain(arrived, view)
        view.progress(_snapshot(client, job))
    return job


def _collect(client: RatchetClient, job_id: str, arrived: queue.SimpleQueue[EventView | None]) -> None:
    from ratchet_contract.errors import RatchetError

    try:
        for event in client.follow_events(job_id):
            arrived.put(event)
    except RatchetError:
        pass  # the polling side meets the same fault, and reports it
    finally:
        arrived.put(None)


def _drain(arrived: queue.SimpleQueue[EventView | None], view: View) -> None:
    while not arrived.empty():
        event = arrived.get()
        if event is not None:
            view.event(event)


def _until_ended(client: RatchetClient, job_id: str, view: View, arrived: queue.SimpleQueue[Any]) -> JobView:
    from ratchet_client.errors import ServiceUnreachable

    away_since: float | None = None
    while True:
        try:
            job = client.job(job_id)
            snapshot = _snapshot(client, job)
        except ServiceUnreachable as error:
            if away_since is None:
                away_since = time.monotonic()
                say_gap(error.detail)
            if time.monotonic() - away_since > _PATIENCE:
                raise
        else:
            away_since = None
            _drain(arrived, view)
            if job.phase.terminal:
                return job
            view.progress(snapshot)
        time.sleep(_POLL)


def _snapshot(client: RatchetClient, job: JobView) -> Snapshot:
    hook = client.hook(job.id) if job.epoch else None
    series = client.metrics(job.id, name=["loss"], max_points=2).series if job.epoch else []
    points = next((s.points for s in series if s.name == "loss"), [])
    return Snapshot(job, hook, points[-1].value if points else None)


def hook_words(hook: HookView | None) -> str:
    """``powerSGD compressing, iteration 120, 7.31x fewer elements``."""
    if hook is None or hook.phase is None:
        return ""
    rate = "" if hook.compression_rate in (None, 1.0) else f", {hook.compression_rate:.3g}x fewer elements"
    return f"{hook.name} {hook.phase}, iteration {hook.iteration}{rate}"


class _PlainView:
    """Events as they come; a progress line every few seconds."""

    def __init__(self) -> None:
        self._next = 0.0
        self._last = ""

    def event(self, event: EventView) -> None:
        output.line(event_line(event))
        output.flush()

    def progress(self, now: Snapshot) -> None:
        if time.monotonic() < self._next and not now.job.phase.terminal:
            return
        parts = [f"step {steps(now.job)}"]
        parts += [] if now.loss is None else [f"loss {now.loss:.4f}"]
        parts += [text for text in (hook_words(now.hook),) if text]
        parts += [f"checkpoint {now.job.last_checkpoint}"] if now.job.last_checkpoint else []
        text = "; ".join(parts)
        if text != self._last:
            output.line(f"{now.job.phase}  {text}")
            output.flush()
        self._last, self._next = text, time.monotonic() + _PLAIN_EVERY


class _JsonView:
    """``{"event": ...}`` and ``{"progress": ...}`` lines."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}

    def event(self, event: EventView) -> None:
        output.emit_line({"event": event})

    def progress(self, now: Snapshot) -> None:
        data = {"phase": now.job.phase, "attempt": now.job.epoch, **now.job.progress.model_dump(), "loss": now.loss,
                "hook_phase": now.hook and now.hook.phase, "hook_iteration": now.hook and now.hook.iteration,
                "compression_rate": now.hook and now.hook.compression_rate, "checkpoint": now.job.last_checkpoint}  # fmt: skip
        if data != self._last:
            output.emit_line({"progress": data})
        self._last = data
