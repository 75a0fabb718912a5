"""``ratchet quota``: lists, shows, sets and deletes quotas, which limit how much an owner may use at one time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli.shared import output
from ratchet_client.cli.shared.options import SETUP, JsonFlag, open_client

if TYPE_CHECKING:
    from ratchet_contract.api.quotas import QuotaView

Owner = Annotated[str, typer.Argument(metavar="OWNER", help="An owner, or '*': each owner without a quota of its own.")]
_MOST = 2**31 - 1
"""Largest limit that the service takes (``QuotaRequest``, whose module is not imported for ``--help``)."""
_KINDS = ("queued", "jobs", "ranks", "gpus")


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Limits on an owner's queued and running jobs, ranks and GPUs.", no_args_is_help=True)
    for name, command in (("list", list_), ("get", get), ("set", set_), ("delete", delete)):
        group.command(name)(command)
    app.add_typer(group, name="quota", rich_help_panel=SETUP)


def list_(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """List all quotas, each with its owner's current use."""
    with open_client(ctx) as client:
        found = list(client.quotas())
    if as_json:
        output.emit(found)
        return
    rows = [[view.owner, *(_cell(view, kind) for kind in _KINDS)] for view in found]
    columns = ["OWNER", *(kind.upper() for kind in _KINDS)]
    output.table(columns, rows, empty="no quota is set: nobody is limited")


def get(ctx: typer.Context, owner: Owner, as_json: JsonFlag = False) -> None:
    """Show the quota that applies to an owner, and its current use."""
    with open_client(ctx) as client:
        view = client.quota(owner)
    _show(view, as_json)


def set_(
    ctx: typer.Context,
    owner: Owner,
    queued: Annotated[
        int | None, typer.Option(min=0, max=_MOST, help="Jobs that have not ended, running ones included.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=0, max=_MOST, help="Jobs with an attempt that has not ended.")] = None,
    ranks: Annotated[int | None, typer.Option(min=0, max=_MOST, help="Ranks of such attempts.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, max=_MOST, help="GPUs of such attempts.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Set all limits of an owner: an omitted option means no limit. Running jobs are not stopped."""
    from ratchet_contract.api.quotas import QuotaRequest

    request = QuotaRequest(queued=queued, jobs=jobs, ranks=ranks, gpus=gpus)
    with open_client(ctx) as client:
        view = client.set_quota(owner, request)
    _show(view, as_json)


def delete(ctx: typer.Context, owner: Owner) -> None:
    """Delete an owner's quota; afterwards the quota of '*' applies, if one is set."""
    with open_client(ctx) as client:
        client.delete_quota(owner)
    output.note(f"{owner} no longer has a quota of its own")


def _show(view: QuotaView, as_json: bool) -> None:
    """Print a quota: its owner, where it comes from, and use and limit of each kind."""
    if as_json:
        output.emit(view)
        return
    source = {"own": "its own", "everybody": "that of *", "none": "none is set"}[view.source]
    output.fields([("owner", view.owner), ("quota", source), *((kind, _cell(view, kind)) for kind in _KINDS)])


def _cell(view: QuotaView, kind: str) -> str:
    """Return use and limit of one kind, like ``3 of 8``; only the limit if the view does not contain the use."""
    limit = getattr(view, kind)
    most = "no limit" if limit is None else str(limit)
    return most if view.in_use is None else f"{getattr(view.in_use, kind)} of {most}"
