"""A number with its noun, for sentences: ``1 step``, ``2 steps``."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """``noun`` is the singular; the plural gets an ``s``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
