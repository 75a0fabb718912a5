"""``ratchet top``: shows the jobs that run or wait in one table, redrawn periodically or, with ``--once``, printed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.job_figures import (
    Snapshot,
    SnapshotReader,
    eta_text,
    snapshot_fields,
    sparkline,
    waiting_text,
)
from ratchet_client.cli.shared.options import (
    LOOK,
    JsonFlag,
    Labels,
    Name,
    Phases,
    Sort,
    active_phases,
    open_client,
    parse_pairs,
    parse_phases,
    steps,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api.views import JobView

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
    limit: Annotated[int, typer.Option(min=1, max=100, help="Maximum number of jobs.")] = 20,
    every: Annotated[float, typer.Option(min=0.2, max=86400, help="Seconds between two refreshes.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and exit.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Watch all running and queued jobs, newest first; Ctrl-C ends it.

    STEPS/S is the speed now, LEFT the time to the last step at that speed, RATE the factor by which the hook cuts sent elements,
    SAVED the age of the last checkpoint, AT RISK the steps done since it.
    """
    phases = parse_phases(phase, "--phase") or active_phases()
    filters = {"label": parse_pairs(label, "--label"), "name": name, "sort": sort}
    if once:
        with open_client(ctx) as client:
            seen = _Table(client, phases, filters, limit).poll()
        if as_json:
            output.emit(_document(seen))
        else:
            _print_table(seen)
        return
    _watch(ctx, phases, filters, limit, every, as_json)


def _watch(
    ctx: typer.Context, phases: list[str], filters: dict[str, Any], limit: int, every: float, as_json: bool
) -> None:
    """Show the jobs every ``every`` seconds until Ctrl-C, as JSON lines or as a table, which is redrawn on a terminal."""
    from ratchet_client.cli.commands.wait import poll

    with open_client(ctx, 0.0) as client:
        table = _Table(client, phases, filters, limit)
        if as_json:
            for seen in poll(table.poll, every):
                output.emit_line(_document(seen))
        elif output.on_terminal():
            _draw(table, every)
        else:
            for number, seen in enumerate(poll(table.poll, every)):
                output.line() if number else None
                _print_table(seen)
                output.flush()


def _draw(table: _Table, every: float) -> None:
    """Redraw the table on the terminal every ``every`` seconds until Ctrl-C."""
    from rich.live import Live
    from rich.text import Text

    from ratchet_client.cli.commands.wait import poll

    with Live(console=output.console(), refresh_per_second=4) as live:

        def gap(detail: str) -> None:
            live.console.print(Text(f"{detail}. Retrying; training continues without the service.", style="yellow"))

        for seen in poll(table.poll, every, gap):
            live.update(_render_table(seen, output.console().width))


@dataclass
class _Table:
    """Reads the matching jobs, at most ``limit``. A job that ends while it is watched is kept until ``_ENDED_STAY`` after its
    end."""

    client: RatchetClient
    phases: list[str]
    filters: dict[str, Any]
    limit: int

    def __post_init__(self) -> None:
        self._snapshot_reader = SnapshotReader(self.client)
        self._previous: dict[str, Snapshot] = {}

    def poll(self) -> list[Snapshot]:
        """Return snapshots of the matching jobs, followed by those of jobs that have just ended."""
        from ratchet_contract.errors import NotFound

        found = self.client.jobs(phase=self.phases, page_size=self.limit, **self.filters)
        jobs = {job.id: job for job in islice(found, self.limit)}
        out: dict[str, Snapshot] = {}
        for job_id in [*jobs, *(known for known in self._previous if known not in jobs)]:
            try:
                job = jobs.get(job_id) or self.client.view(job_id)
                if job_id in jobs or _just_ended(job):
                    out[job_id] = self._snapshot_reader.read(job)
            except NotFound:
                continue  # deleted meanwhile
        self._previous = out
        return list(out.values())


def _just_ended(job: JobView) -> bool:
    """Return True if the job ended less than ``_ENDED_STAY`` ago."""
    return job.phase.terminal and job.ended_at is not None and datetime.now(UTC) - job.ended_at < _ENDED_STAY


def _document(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Return the snapshots as data for ``--json``."""
    jobs = [{"id": now.job.id, "name": now.job.name, **snapshot_fields(now)} for now in snapshots]
    return {"at": output.format_time(datetime.now(UTC)), "jobs": jobs}


def _row(snapshot: Snapshot) -> list[str]:
    """Return the cells of the table's columns for one job."""
    job, progress, hook = snapshot.job, snapshot.job.progress, snapshot.hook
    rate = hook.compression_rate if hook is not None and hook.phase is not None else None
    shown = steps(job)
    return [
        job.id, job.name, str(job.phase), shown,
        f"{100 * progress.step // progress.total_steps}%" if progress.total_steps else "-", eta_text(snapshot) or "-",
        "-" if not progress.steps_per_second else f"{progress.steps_per_second:.3g}",
        "-" if snapshot.loss is None else f"{snapshot.loss:.4f}", sparkline(snapshot.losses),
        job.hook if hook is None or hook.phase is None else f"{job.hook} {hook.phase}",
        "-" if rate is None else f"{rate:.3g}x", output.age(snapshot.checkpoint_at),
        "-" if shown == "-" else str(progress.steps_at_risk), str(job.attempt),
    ]  # fmt: skip


_NOTHING = "no job runs or waits; submit one with: ratchet submit FILE"


def _print_table(snapshots: Sequence[Snapshot]) -> None:
    """Print the table once, with the reasons why jobs wait; only a note if there are no jobs."""
    if not snapshots:
        output.note(_NOTHING)
        return
    if output.on_terminal():
        screen = output.console()
        screen.print(_render_table(snapshots, screen.width))
        return
    curve = _COLUMNS.index("")
    rows = [[cell for i, cell in enumerate([*_row(now), waiting_text(now.job)]) if i != curve] for now in snapshots]
    output.table([*(column for column in _COLUMNS if column), "WHY"], rows, right=_RIGHT)


def _render_table(snapshots: Sequence[Snapshot], width: int) -> RenderableType:
    """Return the table for a terminal of ``width`` columns, with the reasons why jobs wait below the table."""
    from rich.console import Group
    from rich.text import Text

    if not snapshots:
        return Text(_NOTHING, style="dim")
    table, missing = output.render_table(_COLUMNS, [_row(now) for now in snapshots], _RIGHT, _NARROW, width, True)
    waiting = [(f"{now.job.id} {now.job.name}", waiting_text(now.job)) for now in snapshots]
    below = [Text(f"{job}: {' '.join(text.split())}", style="yellow") for job, text in waiting if text]
    named = [column for column in missing if column]
    left_out = [Text(f"too narrow for: {', '.join(named)}", style="dim")] if named else []
    return Group(table, *left_out, *below)
