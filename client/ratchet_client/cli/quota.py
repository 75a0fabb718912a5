"""``ratchet quota``: how much an owner may have at one time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli import output
from ratchet_client.cli.common import SETUP, JsonFlag, open_client

if TYPE_CHECKING:
    from ratchet_contract.api_quotas import QuotaView

Owner = Annotated[str, typer.Argument(metavar="OWNER", help="An owner, or '*': each owner without a quota of its own.")]
_KINDS = ("queued", "jobs", "ranks", "gpus")


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="How much an owner may have at one time.", no_args_is_help=True)
    for name, command in (("list", list_), ("get", get), ("set", set_), ("delete", delete)):
        group.command(name)(command)
    app.add_typer(group, name="quota", rich_help_panel=SETUP)


def list_(ctx: typer.Context, as_json: JsonFlag = False) -> None:
    """Every quota that was set, and what its owner has now."""
    with open_client(ctx) as client:
        found = list(client.quotas())
    if as_json:
        output.emit(found)
        return
    rows = [[view.owner, *(_cell(view, kind) for kind in _KINDS)] for view in found]
    columns = ["OWNER", *(kind.upper() for kind in _KINDS)]
    output.table(columns, rows, empty="no quota is set: nobody is limited")


def get(ctx: typer.Context, owner: Owner, as_json: JsonFlag = False) -> None:
    """What counts for an owner, and what it has now."""
    with open_client(ctx) as client:
        view = client.quota(owner)
    _show(view, as_json)


def set_(
    ctx: typer.Context,
    owner: Owner,
    queued: Annotated[int | None, typer.Option(min=0, help="Jobs that have not ended, running ones included.")] = None,
    jobs: Annotated[int | None, typer.Option(min=0, help="Jobs with an attempt that has not ended.")] = None,
    ranks: Annotated[int | None, typer.Option(min=0, help="Ranks of such attempts.")] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs of such attempts.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Set the whole quota of an owner: what is left out has no limit. Nothing that runs is stopped for it."""
    from ratchet_contract.api_quotas import QuotaRequest

    request = QuotaRequest(queued=queued, jobs=jobs, ranks=ranks, gpus=gpus)
    with open_client(ctx) as client:
        view = client.set_quota(owner, request)
    _show(view, as_json)


def delete(ctx: typer.Context, owner: Owner) -> None:
    """Take an owner's quota away; from then on that of '*' counts, if there is one."""
    with open_client(ctx) as client:
        client.delete_quota(owner)
    output.note(f"{owner} has no quota of its own any more")


def _show(view: QuotaView, as_json: bool) -> None:
    if as_json:
        output.emit(view)
        return
    source = {"own": "its own", "everybody": "that of *", "none": "none is set"}[view.source]
    output.fields([("owner", view.owner), ("quota", source), *((kind, _cell(view, kind)) for kind in _KINDS)])


def _cell(view: QuotaView, kind: str) -> str:
    """``3 of 8``; of ``*``, which counts for each by itself, the limit alone."""
    limit = getattr(view, kind)
    most = "no limit" if limit is None else str(limit)
    return most if view.in_use is None else f"{getattr(view.in_use, kind)} of {most}"
