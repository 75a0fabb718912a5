"""Makes whatever ranks report storable in both databases and readable again: no message may get stuck."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import Any, Final

_MAX_DEPTH: Final = 64
"""Nesting depth of a message's data: every reader must be able to parse it within its recursion limit."""


MAX_DATA: Final = 64 * 1024
"""Characters of one note's data as JSON: a page of events is built in memory, and events are kept as long as their job."""
MAX_TEXT: Final = 16_000
"""Characters of one text; it is shown wherever its job is shown."""
_CUT: Final = " ... (cut)"


def sanitize_text(text: str) -> str:
    """Return the text without NUL characters (which PostgreSQL refuses) and lone surrogates (which UTF-8 refuses), cut to
    ``MAX_TEXT``."""
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - len(_CUT)] + _CUT
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def sanitize_json(value: Any, depth: int = 0) -> Any:
    """Apply ``sanitize_text`` to every text in JSON data. NaN and infinities become text, and data nested too deeply becomes
    "..."."""
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
    """Like ``sanitize_json``, for one note's data; data longer than ``MAX_DATA`` is replaced with ``left_out``, its length in
    characters."""
    found: dict[str, Any] = sanitize_json(value)
    size = len(json.dumps(found, ensure_ascii=False))
    return found if size <= MAX_DATA else {"left_out": size}


def parse_time(text: str, fallback: datetime) -> datetime:
    """Parse a worker's time. Its clock is not checked; for a text that is not a time with a time zone, return ``fallback``."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return fallback
    return at if at.tzinfo is not None else fallback


def printable(text: str) -> str:
    """Return text that can be encoded as UTF-8: an error message may quote an invalid body."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
