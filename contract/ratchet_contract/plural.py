"""Numbers, lists and digests in sentences: ``1 step``, ``2 steps``; ``a, b and 3 more``; ``0f1e2d3c4b5a…``."""

from __future__ import annotations

import re
from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """``noun`` is the singular; the plural gets an ``s``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_of(names: Sequence[str], most: int = 5) -> str:
    """The first ``most`` of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def short_digests(text: str) -> str:
    """``text`` with only the beginning of each SHA-256: enough to tell two apart."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1…", text)
