"""What ranks say, made fit for the database: whatever it is, it must not get stuck on the way in or out."""

from __future__ import annotations

import math
from datetime import datetime
from typing import Any, Final

_MAX_DEPTH: Final = 64
"""Of a message's data: what is stored must be readable again, by every reader's limit of recursion."""


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


def when(text: str, fallback: datetime) -> datetime:
    """A worker's time; its clock is not ours to judge, but a text that is no time gets ``fallback``."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return fallback
    return at if at.tzinfo is not None else fallback
