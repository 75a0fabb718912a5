"""``ratchet hooks``: lists the communication hooks, or the parameters of one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ratchet_client.cli.shared import completion, output
from ratchet_client.cli.shared.options import SETUP, JsonFlag, open_client

if TYPE_CHECKING:
    from ratchet_contract.api import views


_KINDS = {"integer": "whole number", "boolean": "true or false", "string": "text", "object": "mapping"}
_LIMITS = (("minimum", "at least"), ("exclusiveMinimum", "more than"), ("maximum", "at most"))


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=SETUP)(hooks)


def hooks(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show this hook's parameters.", autocompletion=completion.hooks),
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
    parameters = info.parameters or {}
    for key, schema in parameters.get("properties", {}).items():
        if key == "name" or (key == "wrapper" and not info.wrappers):
            continue
        default = (
            "required" if key in parameters.get("required", ()) else f"default {json.dumps(schema.get('default'))}"
        )
        output.line()
        output.sentence(f"{key}: {_values(schema)}; {default}")
        output.sentence(schema.get("description", ""), indent="  ")


def _values(schema: dict[str, Any]) -> str:
    """Return the permitted values of a hook's parameter as text, like ``whole number, at least 1``. ``schema``: its JSON
    schema."""
    if "anyOf" in schema:
        return " or ".join(_values(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(map(str, schema["enum"]))
    kind = _KINDS.get(schema.get("type", ""), schema.get("type", "any"))
    if kind == "mapping" and isinstance(inner := schema.get("additionalProperties"), dict) and "type" in inner:
        kind = f"mapping to {_values(inner)}"
    return ", ".join([kind, *(f"{word} {schema[key]}" for key, word in _LIMITS if key in schema)])


def _list_hooks(found: list[views.HookInfo], as_json: bool) -> None:
    """Print all hooks as a table, or with ``as_json`` as JSON."""
    if as_json:
        output.emit(found)
        return
    output.table(
        ["NAME", "AVAILABLE", "STATE", "BACKENDS", "TITLE"],
        [[h.name, "yes" if h.available else "not yet", "yes" if h.stateful else "no", ",".join(h.backends) or "-", h.title]
         for h in found],
    )  # fmt: skip
