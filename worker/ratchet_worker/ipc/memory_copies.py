"""Copies of the ranks' state in memory: one file without a name, which the agent of a node creates and holds, and its ranks map.
The kernel frees it when agent and ranks have ended.

The file is sparse. It begins with the board: the entries and results of all ranks. A slot of ``_SPAN`` bytes follows for each
entry. A rank has two slots, so that a kill in the middle of a copy leaves it an older one. The copies of an attempt are numbered
from 1, the same on all ranks.

A rank begins copy N only after all ranks have ended copy N - 1. If all of those succeeded, N replaces the copy before N - 1;
if not, it replaces what is left of N - 1. So two slots suffice: while a rank writes N, the others have not begun it, write it, or
have ended it, and none of them touches the newest copy that all ranks have.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import time
from contextlib import suppress
from enum import IntEnum
from typing import Any, Final, NamedTuple

import xxhash

from ratchet_contract.errors import CheckpointError
from ratchet_store.filesystem.durable_io import DAMAGED

_SPAN: Final = 1 << 44
_SLOTS: Final = 2
_WORDS: Final = (
    8  # 64 bits each, of an entry: number, step, bytes of data, header and description, a digest (2), unused
)
_WORD: Final = 8  # bytes
_RESULT_VALUES: Final = 4
_SEAL_SECONDS: Final = 2.0  # for a killed process to release its memory


class Result(IntEnum):
    """How a rank's copy has ended."""

    DONE = 1
    FAILED = 2
    CHANGED = 3  # a tensor changed before it was copied


class Region(NamedTuple):
    """The place of a slot's data: descriptor and offset of the file."""

    fd: int
    offset: int


class Copy(NamedTuple):
    """A rank's copy of ``step``: what its rank file would contain. ``description``: what a save would report."""

    step: int
    header: bytes
    data: memoryview
    description: dict[str, Any]


def create(ranks: int) -> int:
    """Return the descriptor of a new file for the copies of this number of ranks, mode 0600. Raises ``OSError``."""
    fd = os.memfd_create("ratchet-copies", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, (1 + _SLOTS * ranks) * _SPAN)
    return fd


def seal(fd: int) -> None:
    """Make the file unchangeable. This proves that no process can write to it any more. Raises ``OSError`` if one can for two
    seconds."""
    end = time.monotonic() + _SEAL_SECONDS
    while True:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def newest(fd: int, ranks: int) -> int:
    """Return the number of the newest copy that all ranks have; 0: there is none."""
    words = memoryview(os.pread(fd, _SLOTS * ranks * _WORDS * _WORD, 0)).cast("Q")
    numbers = [{words[_entry(rank, slot)] for slot in range(_SLOTS)} for rank in range(ranks)]
    return max(set.intersection(*numbers), default=0)


def read(fd: int, rank: int, number: int) -> Copy:
    """Return the copy with this number. The file is sealed; the bytes of the data are not verified. Raises ``CheckpointError``
    (``checkpoint-damaged``) for any other description than the rank's."""
    for slot in range(_SLOTS):
        entry = os.pread(fd, _WORDS * _WORD, _entry(rank, slot) * _WORD)
        found, step, size, header, description, *digest, _ = memoryview(entry).cast("Q")
        if found != number:
            continue
        offset = slot_offset(rank, slot)
        text = os.pread(fd, min(header + description, _SPAN), offset + _tail(size))
        if _digest(text) != digest or size > _SPAN:
            break
        data = memoryview(b"")
        if size:
            data = memoryview(mmap.mmap(fd, size, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=offset))
        return Copy(step, text[:header], data, json.loads(text[header:]))
    raise CheckpointError(f"the copy of rank {rank} in memory is damaged", code=DAMAGED)


class Board:
    """A rank's side: the entries and results of all ranks. ``number``: of this rank's newest copy; 0: it has begun none.
    ``slot``: where that copy is."""

    def __init__(self, path: str, rank: int, ranks: int) -> None:
        """Open the agent's file at ``path``. Raises ``OSError``."""
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._rank, self._ranks = rank, ranks
        self.number = self.slot = 0
        self._map = mmap.mmap(self._fd, _SLOTS * ranks * (_WORDS + 1) * _WORD, mmap.MAP_SHARED)
        with suppress(AttributeError, OSError):  # a system that lacks it; a forked process would keep the file unsealed
            self._map.madvise(mmap.MADV_DONTFORK)
        # a word is written by one instruction, which a kill does not divide
        self._words = memoryview(self._map).cast("Q")

    def region(self, slot: int) -> Region:
        """Return the place of this rank's slot."""
        return Region(self._fd, slot_offset(self._rank, slot))

    def begin(self) -> int:
        """Begin the next copy, once all ranks have ended the newest one (``results``). Returns the slot to write it to."""
        if set(self.results()) == {Result.DONE}:
            self.slot = (self.slot + 1) % _SLOTS
        self.number += 1
        self._words[_entry(self._rank, self.slot)] = 0
        return self.slot

    def publish(self, step: int, nbytes: int, header: bytes, description: dict[str, Any]) -> None:
        """Write what belongs to the data of the newest copy, then note that it is complete. Raises ``OSError``."""
        text, offset = json.dumps(description).encode(), slot_offset(self._rank, self.slot) + _tail(nbytes)
        for part in (header, text):
            offset += os.pwrite(self._fd, part, offset)
        entry = _entry(self._rank, self.slot)
        values = [step, nbytes, len(header), len(text), *_digest(header + text)]
        for word, value in enumerate(values, entry + 1):
            self._words[word] = value
        self._words[entry] = self.number

    def set_result(self, result: Result) -> None:
        """Note that this rank's newest copy has ended."""
        self._words[self._result(self._rank)] = self.number * _RESULT_VALUES + result

    def results(self) -> list[Result | None]:
        """Return how the newest copy has ended on each rank; None: it has not. Empty before the first copy."""
        if self.number == 0:
            return []
        found = [divmod(self._words[self._result(rank)], _RESULT_VALUES) for rank in range(self._ranks)]
        return [Result(value) if number == self.number else None for number, value in found]

    def _result(self, rank: int) -> int:
        """Return the number of the word with a rank's result of this copy. The next copy has another word: a rank may be one
        ahead."""
        return _SLOTS * self._ranks * _WORDS + _SLOTS * rank + self.number % _SLOTS


def _entry(rank: int, slot: int) -> int:
    """Return the number of an entry's first word."""
    return (_SLOTS * rank + slot) * _WORDS


def slot_offset(rank: int, slot: int) -> int:
    """Return the offset of a slot in the file; the data begins there."""
    return (1 + _SLOTS * rank + slot) * _SPAN


def _tail(nbytes: int) -> int:
    """Return the offset, in a slot, of what follows the data."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _digest(text: bytes) -> list[int]:
    """Return the XXH3-128 of ``text`` as two words."""
    return [*divmod(xxhash.xxh3_128_intdigest(text), 1 << 64)]
