"""``ratchet audit``: shows who changed what, and when."""

from __future__ import annotations

import json
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import SETUP, JsonFlag, Since, Until, open_client, parse_time

if TYPE_CHECKING:
    from ratchet_contract.api.audit import AuditView


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=SETUP)(audit)


def audit(
    ctx: typer.Context,
    actor: Annotated[str | None, typer.Option(help="Only changes by this owner's tokens.")] = None,
    owner: Annotated[str | None, typer.Option(help="Only changes to jobs, tokens or the quota of this owner.")] = None,
    action: Annotated[str | None, typer.Option(help="Only this action, like submit, cancel or create-token.")] = None,
    subject: Annotated[
        str | None, typer.Option(metavar="ID", help="Only changes to the job, token or code with this id.")
    ] = None,
    since: Since = None,
    until: Until = None,
    limit: Annotated[int, typer.Option(min=1, help="Number of changes to list.")] = 50,
    as_json: JsonFlag = False,
) -> None:
    """List who changed what, newest first: an admin sees all changes, others those to their own jobs and their own actions."""
    begin, end = parse_time(since, "--since"), parse_time(until, "--until")
    with open_client(ctx) as client:
        entries = client.audit(
            actor=actor,
            owner=owner,
            action=action,
            subject=subject,
            since=begin,
            until=end,
            page_size=min(limit, 100),
        )
        found = list(islice(entries, limit))
    if as_json:
        output.emit(found)
        return
    columns = ["TIME", "WHO", "ROLE", "TOKEN", "ACTION", "SUBJECT", "OWNER", "WHAT"]
    rows = [
        [
            output.format_time(one.at) or "", one.actor or "the service", one.role or "", one.token_name or "", one.action,
            one.subject if one.subject_kind == "job" else f"{one.subject_kind} {one.subject}", one.owner, _changes_text(one),
        ]
        for one in found
    ]  # fmt: skip
    output.table(columns, rows, drop=("TOKEN", "ROLE", "OWNER", "WHAT"), cut="WHAT", empty="no such change")


def _changes_text(one: AuditView) -> str:
    """Return the entry's data as text, like ``priority 0 -> 5, checkpoint step-000000000005.a0001``."""
    return ", ".join(
        f"{key} {_text(value['old'])} -> {_text(value['new'])}"
        if isinstance(value, dict) and value.keys() == {"old", "new"}
        else f"{key} {_text(value)}"
        for key, value in one.data.items()
    )


def _text(value: object) -> str:
    """Return a value as text; other values than texts as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
