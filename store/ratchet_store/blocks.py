"""The bytes of a rank file, read in blocks: each is verified before anything in it counts, and only those wanted are read.

``preadv`` fills memory that is wanted in place, a scratch buffer takes the rest of a block; what came is hashed while it is in
the processor's cache.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import FileEntry
from ratchet_store.abreast import GivenUp, abreast
from ratchet_store.files import DAMAGED, not_read, open_regular

CHUNK: Final = 256 << 10
"""Bytes that are read at a time, and hashed while they are in the processor's cache: the digests of 1 MiB at a time take half as
long again. The reads are as fast."""
_BATCH: Final = 1024  # buffers per preadv, as Linux allows
Progress = Callable[[int], None]
"""Called with the number of bytes that have been read and hashed since the last call, by the thread that asked for them."""


class Region(NamedTuple):
    """Bytes ``begin <= i < end`` of a file and where they go; None: nowhere, they are only hashed."""

    begin: int
    end: int
    target: memoryview | None


class Block(NamedTuple):
    """A block whose bytes are not those that were saved."""

    number: int
    begin: int
    end: int

    def __str__(self) -> str:
        return (
            f"the bytes do not match their XXH3-128 digest in block {self.number} (bytes {self.begin} to {self.end - 1}): "
            "the file was altered or torn"
        )


@contextmanager
def opened(directory: Path, file: FileEntry) -> Iterator[int]:
    """A descriptor of a rank file that has its size. What fails within names the path: ``CheckpointError`` (``-damaged``,
    ``-unreadable``)."""
    path = directory / file.name
    fd = -1
    try:
        fd = open_regular(path)
        size = os.fstat(fd).st_size
        if size != file.size:
            raise CheckpointError(f"{size} bytes, the manifest says {file.size}: truncated or replaced", code=DAMAGED)
        yield fd
    except OSError as error:
        raise not_read(path, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.detail}", code=error.code) from None
    finally:
        if fd >= 0:
            os.close(fd)


def overlapping(file: FileEntry, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Numbers of the blocks that hold any of the bytes ``begin <= i < end``, ascending."""
    size = file.block_size
    return sorted({n for begin, end in ranges if begin < end for n in range(begin // size, (end - 1) // size + 1)})


def every(file: FileEntry) -> range:
    """Numbers of all blocks of a file."""
    return range(len(file.blocks))


def damaged(
    fd: int,
    file: FileEntry,
    regions: Sequence[Region],
    blocks: Sequence[int],
    progress: Progress | None = None,
    *,
    threads: int = 1,
    first: bool = False,
) -> list[Block]:
    """Read ``blocks``, ascending, into ``regions``, which cover the file from its first byte to its last without gaps; returns
    the damaged ones, whose bytes have been placed all the same. Up to ``threads`` threads have a block each, and ``CHUNK`` bytes
    of memory. ``first``: behind a damaged one none is begun, and only the first is returned. Raises ``CheckpointError`` for a
    file that ends early, ``OSError``."""
    reading = _Reading(fd, file, regions, progress, first)
    _advise(fd, file, blocks)
    try:
        found = abreast(blocks, reading.begin, threads)
    except _Found as one:
        return [one.block]
    reading.tell()
    return [block for block in found if block is not None]


class _Found(Exception):
    """Ends the search, and is none of its errors."""

    def __init__(self, block: Block) -> None:
        super().__init__(str(block))
        self.block = block


class _Reading:
    """One file, of which several threads read blocks. ``progress`` is called by the thread that made this."""

    def __init__(
        self, fd: int, file: FileEntry, regions: Sequence[Region], progress: Progress | None, first: bool
    ) -> None:
        self._fd, self._file, self._regions, self._progress, self._first = fd, file, regions, progress, first
        self._starts = [region.begin for region in regions]
        self._caller, self._lock, self._untold = threading.get_ident(), threading.Lock(), 0

    def begin(self, given_up: GivenUp) -> Callable[[int], Block | None]:
        """What one thread does with a block, by its number."""
        scratch = memoryview(bytearray(min(CHUNK, self._file.size)))
        return lambda number: self._read(number, scratch, given_up)

    def tell(self, count: int = 0) -> None:
        """``count`` more bytes have been read and hashed."""
        if self._progress is None:
            return
        with self._lock:
            self._untold += count
            if threading.get_ident() != self._caller:
                return
            count, self._untold = self._untold, 0
        if count:
            self._progress(count)

    def _read(self, number: int, scratch: memoryview, given_up: GivenUp) -> Block | None:
        size, digests = self._file.block_size, self._file.blocks
        begin, end = number * size, min((number + 1) * size, self._file.size)
        hasher = xxhash.xxh3_128()
        for first in range(begin, end, CHUNK):
            if given_up():
                return None
            last = min(first + CHUNK, end)
            parts = _targets(self._regions, self._starts, first, last, scratch)
            _fill(self._fd, first, last, parts)
            for part in parts:
                hasher.update(part)
            self.tell(last - first)
        if hasher.hexdigest() == digests[number]:
            return None
        block = Block(number, begin, end)
        if self._first:
            raise _Found(block)
        return block


def _targets(
    regions: Sequence[Region], starts: Sequence[int], begin: int, end: int, scratch: memoryview
) -> list[memoryview]:
    """Where the bytes ``begin <= i < end`` go, in order; at most ``len(scratch)`` bytes."""
    parts: list[memoryview] = []
    index, free = bisect_right(starts, begin) - 1, 0
    while begin < end:
        region = regions[index]
        stop = min(region.end, end)
        if region.target is not None:
            parts.append(region.target[begin - region.begin : stop - region.begin])
        else:
            parts.append(scratch[free : free + stop - begin])
            free += stop - begin
        begin, index = stop, index + 1
    return parts


def _fill(fd: int, offset: int, end: int, parts: list[memoryview]) -> None:
    """Read until every part is full."""
    at, skip = 0, 0  # the first part that is not full, and how much of it is
    while offset < end:
        batch = parts[at : at + _BATCH]
        if skip:
            batch[0] = batch[0][skip:]
        count = os.preadv(fd, batch, offset)
        if count == 0:
            raise CheckpointError("the file ends early: truncated", code=DAMAGED)
        offset += count
        if offset == end:
            return
        count += skip
        while count and count >= len(parts[at]):
            count -= len(parts[at])
            at += 1
        skip = count


def _advise(fd: int, file: FileEntry, blocks: Sequence[int]) -> None:
    """Where the whole file is read, front to back, the system may read far ahead. A hint."""
    if len(blocks) == len(file.blocks) and hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
