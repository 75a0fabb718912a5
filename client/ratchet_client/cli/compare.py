"""``ratchet compare``: two jobs' checkpoints, bit for bit, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli import complete, output
from ratchet_client.cli.common import SAVED, JobId, JsonFlag, open_client
from ratchet_client.cli.exits import Exit
from ratchet_contract.plural import counted

if TYPE_CHECKING:
    from ratchet_contract.api import ComparisonView, DifferenceView

COMPARE_SECONDS = 3600.0
"""For one answer: whole checkpoints are read from the disk before it comes."""
MOST_LINES = 10


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=SAVED)(compare)


def compare(
    ctx: typer.Context,
    job: JobId,
    other: JobId,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Of the first job. (default: every step that both have a checkpoint of, until they differ)",
            show_default=False,
            autocompletion=complete.checkpoints,
        ),
    ] = None,
    with_checkpoint: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Of the second job.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare two jobs' checkpoints, every tensor and every rank's state, bit for bit. A difference is exit code 1."""
    with open_client(ctx, timeout=COMPARE_SECONDS) as client:
        found = client.compare(job, other, checkpoint=checkpoint, with_checkpoint=with_checkpoint)
    if as_json:
        output.emit(found)
    else:
        for line in lines(found):
            output.line(line)
    if not found.identical:
        raise typer.Exit(Exit.JOB_FAILED)


def lines(found: ComparisonView) -> list[str]:
    """For people: the verdict, what differs first, and what to do."""
    names = f"{found.job_id}/{found.checkpoint_id} and {found.with_job_id}/{found.with_checkpoint_id}"
    if found.identical:
        return [f"identical: {names}, {counted(found.tensors, 'tensor')} and every rank's state, bit for bit"]
    return [f"not identical: {names}", parted(found), *difference_lines(found)]


def difference_lines(found: ComparisonView) -> list[str]:
    """What differs, one line for each component, causes first, and what to do."""
    of: dict[str, list[DifferenceView]] = {}
    for one in found.differences:
        of.setdefault(one.component, []).append(one)
    out = [f"tensors and values that differ there: {found.different}, causes first:"]
    for component, several in list(of.items())[:MOST_LINES]:
        more = f"; {len(several) - 1} more of {component}" if len(several) > 1 else ""
        out.append(f"  {several[0].place}: {several[0].detail}{more}")
    told, listed = len(out) - 1, len(found.differences)
    if found.different > told:
        out.append(f"  with --json: {'all' if listed == found.different else f'the first {listed}'} of them")
    return [*out, *([f"next: {found.advice}"] if found.advice else [])]


def parted(found: ComparisonView) -> str:
    """Where two that differ part."""
    text = f"first seen in the checkpoint of step {found.step}"
    if found.equal_through is not None:
        text += f", that of step {found.equal_through} is identical"
    if found.first_step is not None:
        text = f"first at step {found.first_step}, behind which their {found.first_part} differ; {text}"
    return text
