"""``ratchet usage``: shows the hours of GPUs, CPU slots and ranks that jobs have used."""

from __future__ import annotations

from typing import Annotated

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import LOOK, JsonFlag, Since, Until, open_client, parse_time


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LOOK)(usage)


def usage(
    ctx: typer.Context,
    by: Annotated[str, typer.Option(help="owner, or label:KEY for the values of a label.")] = "owner",
    since: Since = None,
    until: Until = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a header.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show the hours of GPUs, CPU slots and ranks that jobs have used, by owner or label. (default: in the last 30 days)

    The hours of deleted jobs are not included."""
    if as_csv and as_json:
        raise typer.BadParameter("give --csv or --json, not both")
    begin, end = parse_time(since, "--since"), parse_time(until, "--until")
    with open_client(ctx) as client:
        if as_csv:
            output.line(client.usage_csv(since=begin, until=end, by=by).removesuffix("\n"))
            return
        view = client.usage(since=begin, until=end, by=by)
    if as_json:
        output.emit(view)
        return
    columns = [
        "OWNER" if by == "owner" else by.removeprefix("label:").upper(),
        "JOBS",
        "ATTEMPTS",
        "GPU-H",
        "CPU-H",
        "RANK-H",
    ]
    rows = [
        [
            "(no label)" if one.value is None else one.value, str(one.jobs), str(one.attempts), f"{one.gpu_hours:.2f}",
            f"{one.cpu_hours:.2f}", f"{one.rank_hours:.2f}",
        ]
        for one in view.items
    ]  # fmt: skip
    output.table(columns, rows, right=columns[1:], empty="no attempt has run in this interval")
