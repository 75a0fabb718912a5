"""Writes ``spec.md`` from the models: ``python docs/make_spec.py``. A test compares, so the page cannot fall behind."""

from __future__ import annotations

import json
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ratchet_contract.spec import JobSpec
from ratchet_hooks.registry import HOOKS

PAGE = Path(__file__).with_name("spec.md")
HEAD = """\
# The job spec

YAML or JSON. Unknown keys are refused with the nearest known one; what is marked as not available yet is refused, never
ignored. Durations are seconds, or a number with `s`, `m`, `h` or `d`. `ratchet submit FILE --dry-run` checks a spec against
the machine and shows what would run.

Made from the models by `python docs/make_spec.py`.
"""
_LARGE = 1_000_000
"""A bound above is a machine's, and no news to anybody."""
SECTIONS = ("task", "code", "secrets", "world", "resources", "ddp", "checkpoint", "policy", "launcher")


def page() -> str:
    parts = [HEAD, _table("A job", JobSpec, skip_models=True)]
    for name in SECTIONS:
        model = _model(JobSpec.model_fields[name].annotation)
        assert model is not None
        parts.append(_table(f"`{name}`" if name != "secrets" else "one of `secrets`", model))
    ready = [entry for entry in HOOKS.values() if entry.spec is not None]
    parts += [_table(f"`hook: {{name: {entry.name}}}`", entry.spec) for entry in ready if entry.spec is not None]
    later = ", ".join(f"`{entry.name}`" for entry in HOOKS.values() if entry.spec is None)
    parts.append(f"Named, and refused until they are exact too: {later}.\n")
    return "\n".join(parts)


def _table(title: str, model: type[BaseModel], *, skip_models: bool = False) -> str:
    if set(model.model_fields) <= {"name", "wrapper"}:
        return f"## {title}\n\nNo parameters.\n"
    rows = [f"## {title}\n", "| key | value | default | meaning |", "|---|---|---|---|"]
    for name, info in model.model_fields.items():
        if name == "wrapper" or (name == "name" and model is not JobSpec):
            continue
        inner = skip_models and name in SECTIONS
        kind = "see below" if inner or name == "hook" else _kind(info.annotation)
        meaning = info.description or ""
        rows.append(f"| `{name}` | {kind} | {_default(info)} | {meaning}{_bounds(info)} |".replace("  ", " "))
    return "\n".join(rows) + "\n"


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{a}`" for a in arguments)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys("null" if a is NoneType else _kind(a) for a in arguments))
    if origin is list:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "mapping" if arguments[1] is Any else f"mapping to {_kind(arguments[1])}"
    names = {str: "text", int: "whole number", float: "number", bool: "`true`, `false`"}
    return names.get(annotation, "mapping")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    if isinstance(info.default, BaseModel):
        return f"`{info.default.name}`" if hasattr(info.default, "name") else ""
    return f"`{json.dumps(info.default)}`"


def _bounds(info: FieldInfo) -> str:
    words = {"ge": "at least", "gt": "more than", "le": "at most"}
    bounds = [(word, getattr(m, key, None)) for key, word in words.items() for m in info.metadata]
    found = [f"{word} {bound:g}" for word, bound in bounds if bound is not None and bound <= _LARGE]
    return f" ({', '.join(found)})" if found else ""


def _model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for a in get_args(annotation) if (m := _model(a))), None)


if __name__ == "__main__":
    PAGE.write_text(page())
