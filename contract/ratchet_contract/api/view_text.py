"""How the API's bodies are displayed at a prompt (one line) and in a notebook (a table)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from enum import Enum
from html import escape
from typing import Any, Final

from pydantic import BaseModel

from ratchet_contract.plural import pluralize

_MAX_LINE_CHARS: Final = 80
_MAX_CELL_CHARS: Final = 300
"""Maximum number of characters of a text in a line, and in a cell of a table."""


def displayed_fields(view: BaseModel, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value, shortened, of those fields in ``names`` that have a value. A dotted name is a nested field."""
    for name in names:
        value: Any = view
        for part in name.split("."):
            value = getattr(value, part, None)
        if _has_value(value):
            yield name, _short(value)


def view_table(view: BaseModel) -> str:
    """Return an HTML table of every field of ``view`` that has a value."""
    return html_table(type(view).__name__, {name: getattr(view, name) for name in type(view).model_fields})


def html_table(caption: str, fields: Mapping[str, Any]) -> str:
    """Return an HTML table of those ``fields`` that have a value; all texts are escaped, and long values are cut."""
    left = "style='text-align:left'"
    rows = [
        f"<tr><th {left}>{escape(name)}</th><td {left}>{escape(_truncate(_text(value), _MAX_CELL_CHARS))}</td></tr>"
        for name, value in fields.items()
        if _has_value(value)
    ]
    return f"<table><caption>{escape(caption)}</caption>{''.join(rows)}</table>"


class _Plain(str):
    """A string whose ``repr`` has no quotation marks."""

    def __repr__(self) -> str:
        return str(self)


def _has_value(value: Any) -> bool:
    """False for None and for empty texts, lists and mappings."""
    return value is not None and not (isinstance(value, Mapping | Sequence) and not value)


def _short(value: Any) -> Any:
    """Return a field's value in the short form that ``repr`` displays. For example, a list is displayed as the number of its
    items."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return _truncate(value, _MAX_LINE_CHARS)
    if isinstance(value, datetime):
        return _Plain(_text(value))
    if isinstance(value, Mapping | Sequence):
        return _Plain(f"[{pluralize(len(value), 'item')}]")
    return value


def _text(value: Any) -> str:
    """Return a value as text for a cell of a table, not yet cut."""
    if isinstance(value, datetime):
        return value.isoformat(timespec="seconds")
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(map(_text, value))
    return str(value.value if isinstance(value, Enum) else value)


def _truncate(text: str, max_length: int) -> str:
    """Return ``text``. If it is longer than ``max_length`` characters, cut it there and append ``...``."""
    return text if len(text) <= max_length else text[:max_length] + "..."
