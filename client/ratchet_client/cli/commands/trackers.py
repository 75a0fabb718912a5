"""``ratchet trackers``: what experiment trackers have of a job."""

from __future__ import annotations

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import LOOK, JsonFlag, ReadJobId, open_client


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LOOK)(trackers)


def trackers(ctx: typer.Context, job: ReadJobId, as_json: JsonFlag = False) -> None:
    """Show a job's runs in TensorBoard, MLflow and W&B: newest step that was sent, place, and why a tracker fails."""
    with open_client(ctx) as client:
        found = list(client.trackers(job))
    if as_json:
        output.emit(found)
        return
    rows = [
        [
            run.tracker,
            run.run,
            "-" if run.step is None else str(run.step),
            "failing" if run.failing_since else "done" if run.done else "sending",
            run.place or "-",
        ]
        for run in found
    ]
    output.table(["TRACKER", "RUN", "STEP", "STATE", "PLACE"], rows, empty="no tracker has a run of this job")
    for run in found:
        if run.error is not None:
            output.note(f"{run.tracker} fails since {run.failing_since:%Y-%m-%d %H:%M:%S} UTC: {run.error}")
