"""Makes texts and JSON data, such as ranks' reports, storable in both databases and readable again."""

from __future__ import annotations

import json
import math
from datetime import MAXYEAR, MINYEAR, datetime
from typing import Any, Final, TypeVar

_T = TypeVar("_T")
_MAX_DEPTH: Final = 64
"""Nesting depth of a message's data: every reader must be able to parse it within its recursion limit."""


MAX_DATA: Final = 64 * 1024
"""Characters of one note's data as JSON: a page of events is built in memory, and events are kept as long as their job."""
MAX_TEXT: Final = 16_000
"""Characters of one text; it is shown wherever its job is shown."""
_CUT: Final = " ... (cut)"


def sanitize_text(text: str) -> str:
    """Return the text in a form that both databases can store. A text longer than ``MAX_TEXT`` characters is
    shortened to that length, which includes a note at its end."""
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - len(_CUT)] + _CUT
    text = text.replace("\0", "\ufffd")
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def sanitize_json(value: Any, depth: int = 0) -> Any:
    """Return JSON data in a form that both databases can store: long texts and deep nesting are cut, and non-finite numbers
    become texts. ``depth``: the level of ``value``, for the recursion."""
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, str):
        return sanitize_text(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {sanitize_text(str(key)): sanitize_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [sanitize_json(item, depth + 1) for item in value]
    return value


def sanitize_bounded_json(value: dict[str, Any]) -> dict[str, Any]:
    """Like ``sanitize_json``, but data that then has more than ``MAX_DATA`` characters as JSON is replaced with its size:
    ``{"left_out": characters}``."""
    found: dict[str, Any] = sanitize_json(value)
    size = len(json.dumps(found, ensure_ascii=False))
    return found if size <= MAX_DATA else {"left_out": size}


def parse_time(text: str, fallback: _T) -> datetime | _T:
    """Return the ISO 8601 time in ``text``, or ``fallback`` if ``text`` is not a usable time with a time zone."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return fallback
    # in another time zone, a time of the first or last year may have no date
    return at if at.tzinfo is not None and MINYEAR < at.year < MAXYEAR else fallback


def printable(text: str) -> str:
    """Return the text with lone surrogates and NUL characters escaped, so that it can be stored."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
