"""Texts of a size that a tracker accepts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC
from typing import Final

from ratchet_contract.plural import pluralize
from ratchet_service.trackers.sink import Note

_MAX_NOTE: Final = 1000
"""Characters of one note."""
_CUT: Final = "... (cut)"


def cut(text: str, limit: int) -> str:
    """Return ``text``; one of more than ``limit`` characters is cut, and its end says so."""
    return text if len(text) <= limit else text[: limit - len(_CUT)] + _CUT


def note_line(note: Note) -> str:
    """Return a note as an item of a list in Markdown."""
    when = note.at.astimezone(UTC).isoformat(" ", "seconds").removesuffix("+00:00")
    return f"- step {note.step}, {when} UTC: {cut(' '.join(note.text.split()), _MAX_NOTE)}"


def fitting(lines: Sequence[str], left_out: int, limit: int) -> tuple[list[str], int]:
    """Return the last ``lines`` of which ``joined`` makes at most ``limit`` characters, and how many are left out, with those
    that were before."""
    kept = [*lines]
    size = sum(len(line) + 1 for line in kept) + len(joined([], 10**9))
    while kept and size > limit:
        size -= len(kept.pop(0)) + 1
        left_out += 1
    return kept, left_out


def joined(lines: Sequence[str], left_out: int) -> str:
    """Return the text of the notes. Its first line says how many are left out."""
    head = [f"({pluralize(left_out, 'earlier note')} left out)", ""] if left_out else []
    return "\n".join([*head, *lines])
