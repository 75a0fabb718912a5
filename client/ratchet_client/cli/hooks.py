"""``ratchet hooks``: which communication hooks there are, and the parameters of one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ratchet_client.cli import complete, output
from ratchet_client.cli.common import SETUP, JsonFlag, open_client

if TYPE_CHECKING:
    from ratchet_contract import api


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=SETUP)(hooks)


def hooks(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show this hook's parameters.", autocompletion=complete.hooks),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """List the communication hooks, or show the parameters of one."""
    with open_client(ctx) as client:
        if name is None:
            _list_hooks(client.hooks(), as_json)
            return
        info = client.hook_info(name)
    if as_json:
        output.emit(info)
        return
    output.fields(
        [("name", info.name), ("title", info.title), ("available", "yes" if info.available else "not yet"),
         ("keeps state", "yes" if info.stateful else "no"), ("replicas", info.replicas),
         ("back ends", ", ".join(info.backends)), ("wrappers", ", ".join(info.wrappers))]
    )  # fmt: skip
    for warning in info.warnings:
        output.sentence(f"warning: {warning}")
    properties = (info.parameters or {}).get("properties", {})
    rows = [
        [key, json.dumps(schema.get("default")), schema.get("description", "")]
        for key, schema in properties.items()
        if key not in ("name", "wrapper")
    ]
    if rows:
        output.line()
        output.table(["PARAMETER", "DEFAULT", "MEANING"], rows)


def _list_hooks(found: list[api.HookInfo], as_json: bool) -> None:
    if as_json:
        output.emit(found)
        return
    output.table(
        ["NAME", "AVAILABLE", "STATE", "BACK ENDS", "TITLE"],
        [[h.name, "yes" if h.available else "not yet", "yes" if h.stateful else "no", ",".join(h.backends) or "-", h.title]
         for h in found],
    )  # fmt: skip
