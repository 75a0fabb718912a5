"""``ratchet queue``: shows which job starts next, and why queued jobs wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import LOOK, JsonFlag, MaybeJobId, open_client

if TYPE_CHECKING:
    from ratchet_contract.api.queue import QueuedView


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=LOOK)(queue)


def queue(
    ctx: typer.Context,
    job: MaybeJobId = None,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Number of jobs to list.")] = 50,
    as_json: JsonFlag = False,
) -> None:
    """List the queued jobs of all owners in the order in which they start, and why each waits. Jobs in a back-off are left out.
    With JOB, list only this job, with its position."""
    with open_client(ctx) as client:
        view = client.queue_view(limit, job)
    found = view.items
    if as_json:
        output.emit(found)
        return
    columns = ["#", "ID", "NAME", "OWNER", "PRIORITY", "RANKS", "GPUS", "AGE", "WHY"]
    rows = [
        [
            _position_text(one), one.job_id, one.name, one.owner, str(one.priority), str(one.ranks), str(one.gpus),
            output.age(one.created_at), one.message or one.reason or "",
        ]
        for one in found
    ]  # fmt: skip
    right = ("#", "PRIORITY", "RANKS", "GPUS", "AGE")
    output.table(
        columns,
        rows,
        right=right,
        drop=("OWNER", "GPUS", "RANKS", "AGE"),
        empty="the queue is empty" if job is None else f"{job} is not queued",
    )
    if job is None and view.waiting > len(found):
        output.note(f"{view.waiting - len(found)} more wait (--limit N, at most 100)")


def _position_text(one: QueuedView) -> str:
    """Return the job's position in the queue, like ``12``; ``>1000`` if only a minimum is known; ``-`` if there is none."""
    if one.position is None and one.ahead_at_least is not None:
        return f">{one.ahead_at_least}"
    return output.dash(one.position)
