"""The live view of a job on a terminal: events scroll above lines with figures such as progress and loss."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ratchet_client.cli.commands.logs import event_line
from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.job_figures import (
    Snapshot,
    checkpoint_text,
    eta_text,
    hook_text,
    progress_text,
    sparkline,
    speed_text,
    waiting_text,
)
from ratchet_contract.api.views import EventView
from ratchet_contract.plural import pluralize

_BAR_WIDTH = 30
_NARROWEST_BAR = 8
_GAP = "   "


class LiveView:
    """A context manager that shows a job on a terminal: events and lost connections scroll above lines that are redrawn. On exit
    the redrawn lines disappear."""

    def __init__(self) -> None:
        self._live = Live(console=output.console(), refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def on_event(self, event: EventView) -> None:
        """Print the event above the lines at the bottom, coloured by its cause or phase."""
        words = (event.data.get("cause"), event.data.get("phase"), event.data.get("to"))
        style = next((s for w in words if isinstance(w, str) and (s := output.style_of(w))), "")
        self._live.console.print(Text(event_line(event), style=style))

    def on_progress(self, snapshot: Snapshot) -> None:
        self._live.update(JobLines(snapshot))

    def on_disconnect(self, detail: str) -> None:
        self._live.console.print(Text(f"{detail}. Retrying; training continues without the service.", style="yellow"))


class JobLines:
    """The lines at the bottom of the live view, for one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now, width = self._snapshot, options.max_width
        yield from self._head(width)
        yield from _pack_lines([t for t in self._figures() if t.plain], width)
        waiting = waiting_text(now.job)
        if waiting:
            yield Text(waiting, style="yellow")

    def _head(self, width: int) -> Iterable[Table | Text]:
        """Yield one line with phase and step, and with a progress bar if the number of steps is known and the line is wide
        enough."""
        job = self._snapshot.job
        phase, step = Text(job.phase, style=output.style_of(job.phase)), progress_text(job)
        total = job.progress.total_steps
        room = min(_BAR_WIDTH, width - len(job.phase) - len(step) - 7)
        if total is None or room < _NARROWEST_BAR:
            yield Text.assemble(phase, _GAP, step if total or job.progress.step else f"{step} (no steps reported)")
            return
        line = Table.grid(padding=(0, 1))
        done = f"{100 * job.progress.step // total:>3}%" if total else ""
        line.add_row(phase, ProgressBar(total=total or 1, completed=job.progress.step, width=room), step, done)
        yield line

    def _figures(self) -> list[Text]:
        """Return loss, speed, remaining time, hook, checkpoint, risk and attempt as texts; those that do not apply are empty."""
        now, job = self._snapshot, self._snapshot.job
        eta, risk = eta_text(now), job.progress.steps_at_risk
        loss = "" if now.loss is None else f"loss {now.loss:.4f} {sparkline(now.losses)}".rstrip()
        return [
            Text(loss, style="bold"),
            Text(speed_text(job.progress.steps_per_second)),
            Text(f"{eta} left" if eta else ""),
            Text(hook_text(now.hook), style="dim"),
            Text(f"checkpoint {checkpoint_text(now)}" if job.last_checkpoint else "", style="dim"),
            Text(f"{pluralize(risk, 'step')} at risk" if risk else "", style="dim"),
            Text(f"attempt {job.attempt}" if job.attempt else "", style="dim"),
        ]


def _pack_lines(parts: Iterable[Text], width: int) -> Iterable[Text]:
    """Yield lines with as many of ``parts`` as fit in ``width`` columns. A part that is too long gets its own line."""
    line = Text()
    for part in parts:
        if line and line.cell_len + len(_GAP) + part.cell_len > width:
            yield line
            line = Text()
        line = Text.assemble(line, _GAP, part) if line else part
    if line:
        yield line
