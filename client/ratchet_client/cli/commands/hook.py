"""``ratchet hook``: shows the state of a job's communication hook, once or on every change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import LOOK, JsonFlag, ReadJobId, absence_message, open_client, steps

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from ratchet_contract.api import views

_POLL_SECONDS = 0.5
_NONE = "the hook has reported nothing"
_SOURCES = {"live": "the running attempt", "checkpoint": "the checkpoint that the next attempt starts from"}
_COLUMNS = ["RANK", "PHASE", "ITER", "RATE", "RESIDUAL", "MEMORY", "STEP"]
_NARROW = ["STEP", "MEMORY", "PHASE"]


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LOOK)(hook)


def hook(
    ctx: typer.Context,
    job: ReadJobId,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", "-w", help="Continue until the job has ended: a table by rank, or one line per change."
        ),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show the communication hook of a job: phase, iteration, compression rate, residuals."""
    if watch:
        watch_hook(ctx, job, as_json)
        return
    with open_client(ctx) as client:
        view = client.hook(job)
        none = absence_message(client.view(job), _NONE) if view.phase is None else None
    if as_json:
        output.emit(view)
        return
    output.fields(
        [
            ("hook", view.name), ("source", _SOURCES[view.source] if view.source else None), ("wrapper", view.wrapper),
            ("parameters", ", ".join(f"{k}={v}" for k, v in view.parameters.items() if k not in ("name", "wrapper"))),
            ("phase", view.phase), ("iteration", view.iteration), ("compression rate", _times(view.compression_rate)),
            (
                "elements, all steps" if view.stateful else "elements, one step",
                _from_to(view.elements_before, view.elements_after, output.count),
            ),
            ("bytes, one step", _from_to(view.bytes_before, view.bytes_after, output.size)),
            ("memory", output.size(view.memory_bytes)), ("at step", view.step),
            ("iteration in checkpoint", view.checkpoint_iteration), ("checkpoint", view.checkpoint_id),
            ("updated", output.format_time(view.updated_at)),
        ]
        + [(f"residual norm, rank {rank}", _norm(norm)) for rank, norm in sorted(view.residual_norm.items())]
    )  # fmt: skip
    if none is not None:
        output.note(none)


def _from_to(before: int | None, after: int | None, format_value: Callable[[int], str]) -> str | None:
    """Return ``before -> after`` with both values formatted; None if one of them is unknown."""
    return None if before is None or after is None else f"{format_value(before)} -> {format_value(after)}"


def watch_hook(ctx: typer.Context, job_id: str, as_json: bool) -> None:
    """Show the hook's state until the job has ended: as JSON lines, as a table that is redrawn on a terminal, or as one line per
    change."""
    from ratchet_client.cli.commands.wait import poll

    last: dict[str, Any] = {}
    with open_client(ctx, 0.0) as client, _Screen(not as_json and output.on_terminal()) as screen:
        for job, view in poll(lambda: (client.view(job_id), client.hook(job_id)), _POLL_SECONDS):
            now = view.model_dump(exclude={"updated_at"})
            if screen.live is not None:
                screen.live.update(_render_table(job, view))
            elif now != last and as_json:
                output.emit_line(view)
            elif now != last and view.phase is not None:
                output.line(_change_line(view))
                output.flush()
            last = now
            if job.phase.terminal:
                break
    if not as_json:
        output.note(f"{job.id} {job.phase} at step {steps(job)}")


class _Screen:
    """A context manager that runs rich's live display ``live``; if ``enabled`` is False, ``live`` is None."""

    def __init__(self, enabled: bool) -> None:
        self.live = None
        if enabled:
            from rich.live import Live

            self.live = Live(console=output.console(), refresh_per_second=4)

    def __enter__(self) -> _Screen:
        if self.live is not None:
            self.live.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self.live is not None:
            self.live.__exit__(*exc)


def _render_table(job: views.JobView, view: views.HookView) -> RenderableType:
    """Return the hook's state by rank as a table with a title, or why there is none."""
    from rich.console import Group
    from rich.text import Text

    rows = [
        [str(r.rank), r.phase, str(r.iteration), _times(r.compression_rate) or "-", _norm(r.residual_norm),
         output.size(r.memory_bytes), str(r.step)]
        for r in view.ranks
    ]  # fmt: skip
    right = [column for column in _COLUMNS if column != "PHASE"]
    table, _ = output.render_table(_COLUMNS, rows, right, _NARROW, output.console().width)
    title = Text.assemble((view.name, "bold"), f"  {job.name}  ", (str(job.phase), output.style_of(job.phase)))
    return Group(title, table if rows else Text(absence_message(job, _NONE), style="dim"))


def _change_line(view: views.HookView) -> str:
    """Return the hook's state as one line of text."""
    norms = " ".join(_norm(norm) for _, norm in sorted(view.residual_norm.items()))
    parts = [f"step {view.step}", f"{view.phase}", f"iteration {view.iteration}", _times(view.compression_rate) or ""]
    parts += [f"residual norm by rank {norms}" if norms.strip("- ") else "", f"memory {output.size(view.memory_bytes)}"]
    return "  ".join(part for part in parts if part)


def _norm(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _times(value: float | None) -> str | None:
    return None if value is None else f"{value:.3g}x"
