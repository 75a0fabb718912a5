"""Dataclasses with limits in their fields' metadata, under pydantic's names: checked with pydantic and without it. Torch-free."""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

_BOUNDS: Final = {"ge": (operator.ge, "at least"), "gt": (operator.gt, "more than"), "le": (operator.le, "at most")}


def option(default: Any, description: str, **limits: Any) -> Any:
    """Return a dataclass field. ``limits``: pydantic's, such as ``ge`` and ``pattern``; in ``check`` a pattern must match the
    whole value."""
    return field(default=default, metadata={"description": description, **limits})


@dataclass(frozen=True, kw_only=True)
class Model:
    """Base of dataclasses that pydantic may validate. The class docstring is the description in the JSON schema."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> Any:
        schema = handler(core)
        handler.resolve_ref_schema(schema)["description"] = inspect.cleandoc(cls.__doc__ or "")
        return schema

    def values(self) -> dict[str, Any]:
        """Return all fields as JSON values, by name; keys of nested mappings become strings."""
        return {name: _json(value) for name, value in asdict(self).items()}


def check(instance: Model) -> None:
    """Raise ``ValueError`` that names the first field of ``instance`` with a wrong type or a value outside its limits."""
    cls: Any = type(instance)
    hints = _hints(cls)
    for one in fields(instance):
        value, kind = getattr(instance, one.name), hints[one.name]
        if not _has_type(value, kind):
            raise ValueError(f"{one.name}: must be {_type_text(kind)}, not {value!r}")
        fault = None if value is None else _limit_violation(value, one.metadata)
        if fault is not None:
            raise ValueError(f"{one.name}: must {fault}, not {value!r}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _has_type(value: object, kind: Any) -> bool:
    """True if a value has the annotated type; an integer counts as a float, and ``Any`` means JSON."""
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_has_type(value, part) for part in get_args(kind))
    if get_origin(kind) is dict:
        key, item = get_args(kind)
        return isinstance(value, dict) and all(_has_type(k, key) and _has_type(v, item) for k, v in value.items())
    if kind is Any:
        return _is_json(value)
    return type(value) is kind or (kind is float and type(value) is int)


def _is_json(value: object) -> bool:
    """Return True if the value is made of dicts with strings as keys, lists, strings, numbers, booleans and None."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_json, value))
    return isinstance(value, str | int | float | NoneType)


def _limit_violation(value: Any, limits: Mapping[str, Any]) -> str | None:
    """Return what the value must do to be within the limits, such as ``be at least 1``; None if nothing."""
    for key, (holds, words) in _BOUNDS.items():
        if key in limits and not holds(value, limits[key]):
            return f"be {words} {limits[key]}"
    if limits.get("allow_inf_nan") is False and not math.isfinite(value):
        return "be finite"
    if "min_length" in limits and len(value) < limits["min_length"]:
        return f"have a length of at least {limits['min_length']}"
    if "max_length" in limits and len(value) > limits["max_length"]:
        return f"have a length of at most {limits['max_length']}"
    if "pattern" in limits and re.fullmatch(limits["pattern"], value) is None:
        return f"match {limits['pattern']}"
    return None


def _type_text(kind: Any) -> str:
    """Return an annotated type as text for a message."""
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) in (Union, UnionType):
        return " or ".join(map(_type_text, get_args(kind)))
    if get_origin(kind) is dict:
        key, item = get_args(kind)
        return f"a dict of {_type_text(key)} to {_type_text(item)}"
    names = {Any: "JSON", NoneType: "None", bool: "True or False", int: "an int", float: "a float", str: "a str"}
    return names[kind]


def _json(value: Any) -> Any:
    return {str(key): _json(item) for key, item in value.items()} if isinstance(value, dict) else value
