"""The single copies that a save is made of, and how two threads share them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

SHARE: Final = 4 << 20
"""Bytes that one thread copies before it takes more: with less the lock costs more than the sharing saves."""


class Move(NamedTuple):
    """One copy: bytes ``begin <= i < end`` of the source with this number."""

    number: int
    begin: int
    end: int


class Work:
    """The moves of one kind. Two threads may take them."""

    def __init__(self, moves: Sequence[Move]) -> None:
        self._moves, self._next, self._made = moves, 0, 0
        self._lock = threading.Lock()
        self._owner: int | None = None

    def take(self) -> Sequence[Move]:
        """Moves that no thread has taken; none where none is left, or another thread has taken over."""
        with self._lock:
            first, nbytes = self._next, 0
            if self._owner not in (None, threading.get_ident()):
                return ()
            while self._next < len(self._moves) and nbytes < SHARE:
                nbytes += self._moves[self._next].end - self._moves[self._next].begin
                self._next += 1
            return self._moves[first : self._next]

    def take_over(self) -> None:
        """This thread takes all that is left."""
        with self._lock:
            self._owner = self._owner or threading.get_ident()

    def made(self, count: int) -> None:
        with self._lock:
            self._made += count

    def end(self) -> None:
        """Leave out what nobody has taken yet."""
        with self._lock:
            self._next = len(self._moves)

    @property
    def is_made(self) -> bool:
        return self._made == len(self._moves)


def cut(number: int, nbytes: int, *, whole: bool = False) -> Iterator[Move]:
    """The moves of one source: several of a large one, so that two threads share it, unless it must be copied as a ``whole``."""
    begin = 0
    while not whole and nbytes - begin > 2 * SHARE:
        yield Move(number, begin, begin + SHARE)
        begin += SHARE
    yield Move(number, begin, nbytes)
