"""The single copies that a save is made of, and how threads share them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final

SHARE: Final = 4 << 20
"""Bytes that one thread copies before it looks for more: less costs more in Python than it shares out."""

Move = tuple[int, int | None, int, int, int]
"""One copy: the source's number; torch's count of changes when it was asked for, or None where it is made at once; addresses to
and from in contiguous memory of the host (from 0: torch makes the copy); bytes."""


class Work:
    """The moves of one kind, which threads share."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves, self._next, self._made = moves, 0, 0
        self._lock = threading.Lock()
        self._owner: int | None = None

    def take(self) -> Sequence[Move]:
        """Moves that nobody else has; none where none is left, or another thread has taken over."""
        with self._lock:
            first, nbytes = self._next, 0
            if self._owner not in (None, threading.get_ident()):
                return ()
            while self._next < len(self._moves) and nbytes < SHARE:
                nbytes += self._moves[self._next][-1]
                self._next += 1
            return self._moves[first : self._next]

    def take_over(self) -> None:
        """This thread alone goes on."""
        with self._lock:
            self._owner = self._owner or threading.get_ident()

    def made(self, count: int) -> None:
        with self._lock:
            self._made += count

    def end(self) -> None:
        """None is left."""
        with self._lock:
            self._next = len(self._moves)

    @property
    def is_made(self) -> bool:
        return self._made == len(self._moves)


def cut(move: Move) -> Iterator[Move]:
    """So that two threads have something of a large one, too."""
    number, version, target, origin, nbytes = move
    while origin and nbytes > 2 * SHARE:
        yield number, version, target, origin, SHARE
        target, origin, nbytes = target + SHARE, origin + SHARE, nbytes - SHARE
    yield number, version, target, origin, nbytes
