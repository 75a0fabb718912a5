"""``ratchet metrics``: shows the newest values of the metrics that a job has logged, or one curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.job_figures import sparkline
from ratchet_client.cli.shared.options import LOOK, JsonFlag, ReadJobId, absence_message, open_client

if TYPE_CHECKING:
    from ratchet_client.resources.client import RatchetClient
    from ratchet_contract.api.views import MetricSeries

_POINTS = 16
_CURVE = 1000
_NAMED = 6


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LOOK)(metrics)


def metrics(
    ctx: typer.Context,
    job: ReadJobId,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Print all values of this metric.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show the metrics of a job: the last value and the curve of each, or all values of one.

    A redone step appears once, with its newest value. A long curve is thinned to 1000 points.
    """
    with open_client(ctx) as client:
        names = () if name is None else (name,)
        found = client.metrics(job, name=names, max_points=_POINTS if name is None and not as_json else _CURVE)
        series = [one for one in found.series if one.points]
        none = (
            absence_message(client.view(job), "nothing is logged by session.log({name: value})") if not series else ""
        )
    if as_json:
        output.emit(found)
        return
    if name is not None:
        none = f"no value of {name}; `ratchet metrics {job}` lists the names"
        rows = [[str(point.step), str(point.attempt), f"{point.value:.6g}"] for one in series for point in one.points]
        output.table(["STEP", "ATTEMPT", "VALUE"], rows, right=["STEP", "ATTEMPT", "VALUE"], empty=none)
        return
    output.table(
        ["NAME", "LAST", "AT STEP", "COURSE"], [_row(one) for one in series], right=["LAST", "AT STEP"],
        drop=["COURSE", "AT STEP"], empty=none,
    )  # fmt: skip


def _row(series: MetricSeries) -> list[str]:
    """Return the table's cells for one metric: name, last value, its step, and the curve."""
    last = series.points[-1]
    return [series.name, f"{last.value:.6g}", str(last.step), sparkline([point.value for point in series.points])]


def last_values_text(client: RatchetClient, job_id: str) -> str:
    """Return the last values of up to six metrics, like ``accuracy 0.97, loss 0.12``; "" if nothing is logged."""
    series = [one for one in client.metrics(job_id, max_points=2).series if one.points]
    words = [f"{one.name} {one.points[-1].value:.4g}" for one in series[:_NAMED]]
    return ", ".join(words) + (f" and {len(series) - _NAMED} more" if len(series) > _NAMED else "")
