"""``ratchet compare``: has the service compare checkpoints of two jobs bit for bit, and prints the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli.shared import completion, output
from ratchet_client.cli.shared.exit_codes import Exit
from ratchet_client.cli.shared.options import SAVED, JobId, JsonFlag, open_client
from ratchet_contract.plural import pluralize

if TYPE_CHECKING:
    from ratchet_contract.api.views import ComparisonView, DifferenceView

COMPARE_SECONDS = 3600.0
"""Timeout for one response: the service may read whole checkpoints from the disk before it responds."""
MAX_LINES = 10


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=SAVED)(compare)


def compare(
    ctx: typer.Context,
    job: JobId,
    other: JobId,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Of the first job. (default: each step at which both jobs have a checkpoint, until they differ)",
            show_default=False,
            autocompletion=completion.checkpoints,
        ),
    ] = None,
    with_checkpoint: Annotated[
        str | None, typer.Option(metavar="CHECKPOINT", help="Of the second job.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare two jobs' checkpoints, every tensor and every rank's state, bit for bit. Exit code 1 if they differ."""
    with open_client(ctx, timeout=COMPARE_SECONDS) as client:
        found = client.compare(job, other, checkpoint=checkpoint, with_checkpoint=with_checkpoint)
    if as_json:
        output.emit(found)
    else:
        for line in lines(found):
            output.line(line)
    if not found.identical:
        raise typer.Exit(Exit.JOB_FAILED)


def lines(comparison: ComparisonView) -> list[str]:
    """Return the text for a comparison: the verdict, and for jobs that differ also what differs."""
    names = (
        f"{comparison.job_id}/{comparison.checkpoint_id} and {comparison.with_job_id}/{comparison.with_checkpoint_id}"
    )
    if comparison.identical:
        return [f"identical: {names}, {pluralize(comparison.tensors, 'tensor')} and every rank's state, bit for bit"]
    return [f"not identical: {names}", divergence_text(comparison), *difference_lines(comparison)]


def difference_lines(comparison: ComparisonView) -> list[str]:
    """Return text lines on what differs: the number of differences, one line for each of up to ``MAX_LINES`` components, a
    reference to ``--json`` if there are more differences, and advice if there is any."""
    of: dict[str, list[DifferenceView]] = {}
    for one in comparison.differences:
        of.setdefault(one.component, []).append(one)
    out = [f"tensors and values that differ at that step: {comparison.different}, causes first:"]
    for component, several in list(of.items())[:MAX_LINES]:
        more = f"; {len(several) - 1} more of {component}" if len(several) > 1 else ""
        out.append(f"  {several[0].place}: {several[0].detail}{more}")
    told, listed = len(out) - 1, len(comparison.differences)
    if comparison.different > told:
        out.append(f"  with --json: {'all' if listed == comparison.different else f'the first {listed}'} of them")
    return [*out, *([f"next: {comparison.advice}"] if comparison.advice else [])]


def divergence_text(comparison: ComparisonView) -> str:
    """Return, as text, the first step at which two differing jobs are known to differ, and the last equal one if it is known."""
    text = f"first seen in the checkpoint of step {comparison.step}"
    if comparison.equal_through is not None:
        text += f", that of step {comparison.equal_through} is identical"
    if comparison.first_step is not None:
        text = f"first at step {comparison.first_step}, after which their {comparison.first_part} differ; {text}"
    return text
