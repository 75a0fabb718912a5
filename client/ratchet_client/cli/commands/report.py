"""``ratchet report``: writes a job's web page with its data to one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import LOOK, ReadJobId, open_client
from ratchet_client.cli.shared.signals import interruptible


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LOOK)(report)


def report(
    ctx: typer.Context,
    job: ReadJobId,
    output_path: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File to write. (default: report-NAME.html, by the job's name)"
        ),
    ] = None,
    log_bytes: Annotated[
        int,
        typer.Option(
            "--logs",
            metavar="BYTES",
            min=0,
            max=2**31 - 1,
            help="Bytes of each rank's log, from its end, at most a line for every 32; 0: no logs.",
        ),
    ] = 65536,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
) -> None:
    """Write the job's web page with its data to one HTML file, for somebody who cannot reach the service.

    The file shows the job as it is now, and opens in a browser without a network. It has what the job's page shows: also names of
    hosts and files, log lines, and the spec.
    """
    with interruptible(), open_client(ctx) as client:
        file = output_path or Path(f"report-{client.view(job).name}.html")
        left_out = client.report(job, file, log_bytes=log_bytes, force=force)
    output.line(f"{file}  {output.size(file.stat().st_size)}")
    for text in left_out:
        output.line(f"left out: {text}")
