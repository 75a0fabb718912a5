"""Makes what ranks report storable in both databases and readable again: no message may fail again and again."""

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
    """Return the text with NUL characters (which PostgreSQL refuses) and lone surrogates (which UTF-8 refuses) replaced. A text
    longer than ``MAX_TEXT`` characters is cut to that length, and then ends with a mark of the cut."""
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - len(_CUT)] + _CUT
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def sanitize_json(value: Any, depth: int = 0) -> Any:
    """Return JSON data with ``sanitize_text`` applied to every text and key. NaN and infinities become text. Data nested more
    than ``_MAX_DEPTH`` levels deep are replaced by "...". ``depth``: the level of ``value``, for the recursion."""
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
    """Like ``sanitize_json``, for the data of one note. Data of more than ``MAX_DATA`` characters as JSON is replaced with
    ``{"left_out": number of its characters}``."""
    found: dict[str, Any] = sanitize_json(value)
    size = len(json.dumps(found, ensure_ascii=False))
    return found if size <= MAX_DATA else {"left_out": size}


def parse_time(text: str, fallback: _T) -> datetime | _T:
    """Return the ISO 8601 time that a worker reports in ``text``. Return ``fallback`` if ``text`` is not a time with a time zone,
    or is of the year 1 or 9999: in another time zone, such a time may have no date. Whether the time is plausible is not checked
    otherwise."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return fallback
    return at if at.tzinfo is not None and MINYEAR < at.year < MAXYEAR else fallback


def printable(text: str) -> str:
    """Return the text in a form that can be encoded as UTF-8 and stored, with lone surrogates and NUL characters escaped: an
    error message may quote an invalid body."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
