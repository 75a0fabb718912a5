"""What ranks say, made fit for the database: whatever it is, it must not get stuck on the way in or out."""

from __future__ import annotations

import json
import math
from datetime import datetime
from typing import Any, Final

_MAX_DEPTH: Final = 64
"""Of a message's data: what is stored must be readable again, by every reader's limit of recursion."""


MAX_DATA: Final = 64 * 1024
"""Characters of one note's data as JSON: a page of events is put together in memory, and events stay as long as their job."""
MAX_TEXT: Final = 16_000
"""Characters of one text; it is shown wherever its job is."""
_CUT: Final = " ... (cut)"


def storable(text: str) -> str:
    """Text without what PostgreSQL or UTF-8 refuse, NUL characters and halves of surrogate pairs; what is too long is cut."""
    if len(text) > MAX_TEXT:
        text = text[: MAX_TEXT - len(_CUT)] + _CUT
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def storable_json(value: Any, depth: int = 0) -> Any:
    """The same for every text in JSON data; numbers that are no JSON become their names, what is nested too deeply "..."."""
    if depth > _MAX_DEPTH:
        return "..."
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {storable(str(key)): storable_json(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [storable_json(item, depth + 1) for item in value]
    return value


def bounded_json(value: dict[str, Any]) -> dict[str, Any]:
    """The same of one note's data; in the place of what is longer than ``MAX_DATA``: ``left_out``, its characters."""
    found: dict[str, Any] = storable_json(value)
    size = len(json.dumps(found, ensure_ascii=False))
    return found if size <= MAX_DATA else {"left_out": size}


def when(text: str, fallback: datetime) -> datetime:
    """A worker's time; its clock is not ours to judge, but a text that is no time gets ``fallback``."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return fallback
    return at if at.tzinfo is not None else fallback
