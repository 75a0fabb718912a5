"""Numbers, lists and digests in sentences: ``1 step``, ``2 steps``; ``a, b and 3 more``; ``0f1e2d3c4b5a…``."""

from __future__ import annotations

import re
from collections.abc import Sequence


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``2 steps``. ``noun``: the singular; the plural gets an ``s``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def join_first(names: Sequence[str], max_count: int = 5) -> str:
    """Return the first ``max_count`` names, and the number of further ones: ``a, b and 3 more``."""
    more = f" and {len(names) - max_count} more" if len(names) > max_count else ""
    return ", ".join(names[:max_count]) + more


def short_digests(text: str) -> str:
    """Return ``text`` with each SHA-256 in lower-case hex cut to 12 digits and ``…``."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", text)
