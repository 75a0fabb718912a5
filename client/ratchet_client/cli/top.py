"""``ratchet top``: all jobs that run or wait, in one table that is drawn anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratchet_client.cli import output
from ratchet_client.cli.common import (
    LOOK,
    JsonFlag,
    Labels,
    Name,
    Phases,
    Sort,
    active_phases,
    known_phases,
    open_client,
    pairs,
    steps,
)
from ratchet_client.cli.figures import (
    Lookout,
    Snapshot,
    eta_words,
    facts,
    sparkline,
    waiting_words,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ratchet_client.client import RatchetClient
    from ratchet_contract.api import JobView

_COLUMNS = [
    "ID", "NAME", "PHASE", "STEP", "DONE", "LEFT", "STEPS/S", "LOSS", "", "HOOK", "RATE", "SAVED", "AT RISK", "ATTEMPT"
]  # fmt: skip
_RIGHT = ["STEP", "DONE", "LEFT", "STEPS/S", "LOSS", "RATE", "SAVED", "AT RISK", "ATTEMPT"]
_NARROW = ["ATTEMPT", "", "RATE", "AT RISK", "SAVED", "HOOK", "LEFT", "STEPS/S", "DONE", "LOSS", "STEP", "NAME"]
_ENDED_STAY = timedelta(seconds=60)
"""How long a job that ended while it was watched stays in the table."""


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LOOK)(top)


def top(
    ctx: typer.Context,
    phase: Phases = [],  # noqa: B006
    label: Labels = [],  # noqa: B006
    name: Name = None,
    sort: Sort = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="At most so many jobs.")] = 20,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Watch all jobs that run or wait for their turn, newest first; Ctrl-C ends it.

    STEPS/S is the speed now, LEFT the time to the last step at that speed, RATE how many times fewer elements the hook sends,
    SAVED the age of the last checkpoint, AT RISK the steps done since it.
    """
    phases = known_phases(phase, "--phase") or active_phases()
    filters = {"label": pairs(label, "--label"), "name": name, "sort": sort}
    if once:
        with open_client(ctx) as client:
            seen = _Table(client, phases, filters, limit).look()
        if as_json:
            output.emit(_document(seen))
        else:
            _printed(seen)
        return
    _watch(ctx, phases, filters, limit, every, as_json)


def _watch(
    ctx: typer.Context, phases: list[str], filters: dict[str, Any], limit: int, every: float, as_json: bool
) -> None:
    from ratchet_client.cli.watch import polled

    with open_client(ctx, 0.0) as client:
        table = _Table(client, phases, filters, limit)
        if as_json:
            for seen in polled(table.look, every):
                output.emit_line(_document(seen))
        elif output.on_terminal():
            _draw(table, every)
        else:
            for number, seen in enumerate(polled(table.look, every)):
                output.line() if number else None
                _printed(seen)
                output.flush()


def _draw(table: _Table, every: float) -> None:
    from rich.live import Live
    from rich.text import Text

    from ratchet_client.cli.watch import polled

    with Live(console=output.console(), refresh_per_second=4) as live:

        def gap(detail: str) -> None:
            live.console.print(Text(f"{detail}. Still trying; training goes on without the service.", style="yellow"))

        for seen in polled(table.look, every, gap):
            live.update(_drawn(seen, output.console().width))


@dataclass
class _Table:
    """Looks for the jobs that fit, and keeps those in sight that ended meanwhile."""

    client: RatchetClient
    phases: list[str]
    filters: dict[str, Any]
    limit: int

    def __post_init__(self) -> None:
        self._lookout = Lookout(self.client)
        self._known: dict[str, Snapshot] = {}

    def look(self) -> list[Snapshot]:
        from ratchet_contract.errors import NotFound

        found = self.client.jobs(phase=self.phases, page_size=self.limit, **self.filters)
        jobs = {job.id: job for job in islice(found, self.limit)}
        out: dict[str, Snapshot] = {}
        for job_id in [*jobs, *(known for known in self._known if known not in jobs)]:
            try:
                job = jobs.get(job_id) or self.client.view(job_id)
                if job_id in jobs or _just_ended(job):
                    out[job_id] = self._lookout.see(job)
            except NotFound:
                continue  # deleted meanwhile
        self._known = out
        return list(out.values())


def _just_ended(job: JobView) -> bool:
    return job.phase.terminal and job.ended_at is not None and datetime.now(UTC) - job.ended_at < _ENDED_STAY


def _document(seen: Sequence[Snapshot]) -> dict[str, Any]:
    jobs = [{"id": now.job.id, "name": now.job.name, **facts(now)} for now in seen]
    return {"at": output.moment(datetime.now(UTC)), "jobs": jobs}


def _row(now: Snapshot) -> list[str]:
    job, progress, hook = now.job, now.job.progress, now.hook
    rate = hook.compression_rate if hook is not None and hook.phase is not None else None
    shown = steps(job)
    return [
        job.id, job.name, str(job.phase), shown,
        f"{100 * progress.step // progress.total_steps}%" if progress.total_steps else "-", eta_words(now) or "-",
        "-" if not progress.steps_per_second else f"{progress.steps_per_second:.3g}",
        "-" if now.loss is None else f"{now.loss:.4f}", sparkline(now.losses),
        job.hook if hook is None or hook.phase is None else f"{job.hook} {hook.phase}",
        "-" if rate is None else f"{rate:.3g}x", output.age(now.checkpoint_at),
        "-" if shown == "-" else str(progress.steps_at_risk), str(job.attempt),
    ]  # fmt: skip


_NOTHING = "no job runs or waits; submit one with: ratchet submit FILE"


def _printed(seen: Sequence[Snapshot]) -> None:
    """As a terminal shows it, or, in a pipe, with the reason as the last column: lines there have no width."""
    if not seen:
        output.note(_NOTHING)
        return
    if output.on_terminal():
        screen = output.console()
        screen.print(_drawn(seen, screen.width))
        return
    curve = _COLUMNS.index("")
    rows = [[cell for i, cell in enumerate([*_row(now), waiting_words(now.job)]) if i != curve] for now in seen]
    output.table([*(column for column in _COLUMNS if column), "WHY"], rows, right=_RIGHT)


def _drawn(seen: Sequence[Snapshot], width: int) -> RenderableType:
    """Why a job waits stands below the table: it is given the whole width, and never left out."""
    from rich.console import Group
    from rich.text import Text

    if not seen:
        return Text(_NOTHING, style="dim")
    table, missing = output.drawn_table(_COLUMNS, [_row(now) for now in seen], _RIGHT, _NARROW, width, True)
    waiting = [(f"{now.job.id} {now.job.name}", waiting_words(now.job)) for now in seen]
    below = [Text(f"{job}: {' '.join(text.split())}", style="yellow") for job, text in waiting if text]
    named = [column for column in missing if column]
    left_out = [Text(f"too narrow for: {', '.join(named)}", style="dim")] if named else []
    return Group(table, *left_out, *below)
