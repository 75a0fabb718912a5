"""The view of a job on a terminal: events scroll by above, the last lines show progress, hook and checkpoint."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from ratchet_client.cli import output
from ratchet_client.cli.common import steps
from ratchet_client.cli.streams import event_line
from ratchet_client.cli.watch import Snapshot, hook_words
from ratchet_contract.api import EventView

_BAR_WIDTH = 30


class LiveView:
    """A context: the lines at the bottom go away at the end, the events stay."""

    def __init__(self) -> None:
        self._live = Live(console=output.console(), refresh_per_second=4, transient=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def event(self, event: EventView) -> None:
        words = (event.data.get("cause"), event.data.get("phase"), event.data.get("to"))
        style = next((s for w in words if isinstance(w, str) and (s := output.style_of(w))), "")
        self._live.console.print(Text(event_line(event), style=style))

    def progress(self, now: Snapshot) -> None:
        self._live.update(render(now))


def render(now: Snapshot) -> Group:
    """The lines at the bottom."""
    job = now.job
    head = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=job.progress.total_steps or None, completed=job.progress.step, width=_BAR_WIDTH)
    loss = "" if now.loss is None else f"loss {now.loss:.4f}"
    head.add_row(
        Text(job.phase, style=output.style_of(job.phase)), bar, f"step {steps(job)}", f"attempt {job.epoch}", loss
    )
    lines = [head]
    rest = [hook_words(now.hook), f"last checkpoint {job.last_checkpoint}" if job.last_checkpoint else ""]
    rest.append(f"{job.progress.steps_at_risk} steps at risk" if job.progress.steps_at_risk else "")
    return Group(*lines, Text("   ".join(text for text in rest if text), style="dim"))
