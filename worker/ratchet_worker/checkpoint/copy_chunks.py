"""The individual copies that make up a save, and how two threads share them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

BYTES_PER_TURN: Final = 4 << 20
"""Minimum bytes that a thread takes at a time, if so many are left: with fewer, the lock costs more than sharing saves."""


class Move(NamedTuple):
    """One copy: bytes ``begin <= i < end`` of the source with the number ``number``."""

    number: int
    begin: int
    end: int


class Work:
    """The copies (moves) of all tensors of one kind, which two threads may share."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves, self._next, self._done_count = moves, 0, 0
        self._lock = threading.Lock()
        self._owner: int | None = None

    def take(self) -> Sequence[Move]:
        """Return the next moves, of at least ``BYTES_PER_TURN`` bytes if possible; empty if none is left or another thread has
        taken over."""
        with self._lock:
            first, nbytes = self._next, 0
            if self._owner not in (None, threading.get_ident()):
                return ()
            while self._next < len(self._moves) and nbytes < BYTES_PER_TURN:
                nbytes += self._moves[self._next].end - self._moves[self._next].begin
                self._next += 1
            return self._moves[first : self._next]

    def take_over(self) -> None:
        """Reserve all remaining moves for the calling thread, unless another thread has done so before."""
        with self._lock:
            self._owner = self._owner or threading.get_ident()

    def mark_done(self, count: int) -> None:
        """Count ``count`` moves as done. Any thread may call it."""
        with self._lock:
            self._done_count += count

    def cancel(self) -> None:
        """Drop the moves that no thread has taken. If there are any, ``is_done`` stays False."""
        with self._lock:
            self._next = len(self._moves)

    @property
    def is_done(self) -> bool:
        """True if all moves are done."""
        return self._done_count == len(self._moves)


def split_copy(number: int, nbytes: int, *, undivided: bool = False) -> Iterator[Move]:
    """Yield the moves that copy the ``nbytes`` of source ``number``: several for a large one, unless ``undivided``."""
    begin = 0
    while not undivided and nbytes - begin > 2 * BYTES_PER_TURN:
        yield Move(number, begin, begin + BYTES_PER_TURN)
        begin += BYTES_PER_TURN
    yield Move(number, begin, nbytes)
