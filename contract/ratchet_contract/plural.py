"""Numbers and lists in sentences: ``1 step``, ``2 steps``; ``a, b and 3 more``."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """``noun`` is the singular; the plural gets an ``s``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_of(names: Sequence[str], most: int = 5) -> str:
    """The first ``most`` of them, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
