"""How the API's bodies look at a prompt (one line) and in a notebook (a table)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from html import escape
from typing import Any, Final

from pydantic import BaseModel

from ratchet_contract.plural import counted

_LONGEST: Final = 80
_LONGEST_CELL: Final = 300
"""Characters of a text in a line, and in a cell of a table."""


def shown(view: BaseModel, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The fields ``names`` that have a value, for ``repr``; a dotted name is one further down. Long texts are cut, of lists and
    mappings there is the length."""
    for name in names:
        value: Any = view
        for part in name.split("."):
            value = getattr(value, part, None)
        if _is_there(value):
            yield name, _short(value)


def table(view: BaseModel) -> str:
    """HTML with every field that has a value."""
    return html_table(type(view).__name__, {name: getattr(view, name) for name in type(view).model_fields})


def html_table(caption: str, fields: Mapping[str, Any]) -> str:
    """HTML with those ``fields`` that have a value; all texts are escaped."""
    left = "style='text-align:left'"
    rows = [
        f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(_cut(_text(value), _LONGEST_CELL))}</td></tr>"
        for name, value in fields.items()
        if _is_there(value)
    ]
    return f"<table><caption>{escape(caption)}</caption>{''.join(rows)}</table>"


class _Plain(str):
    """Without quotation marks in ``repr``."""

    def __repr__(self) -> str:
        return str(self)


def _is_there(value: Any) -> bool:
    return value is not None and not (isinstance(value, Mapping | Sequence) and not value)


def _short(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return _cut(value, _LONGEST)
    if isinstance(value, datetime):
        return _Plain(_text(value))
    if isinstance(value, Mapping | Sequence):
        return _Plain(f"[{counted(len(value), 'item')}]")
    return value


def _text(value: Any) -> str:
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(map(_text, value))
    return str(value.value if isinstance(value, Enum) else value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + "..."
