"""Read the bytes of a rank file in blocks: each is verified before anything in it counts, and only requested ones are read.

``preadv`` fills the target memory in place, a scratch buffer takes the rest of a block; the bytes are hashed while they are in
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

from ratchet_contract.checkpoint.manifest import FileEntry
from ratchet_contract.errors import CheckpointError
from ratchet_store.filesystem.durable_io import DAMAGED, open_regular, read_error
from ratchet_store.read.parallel import IsCancelled, parallel_map

CHUNK: Final = 256 << 10
"""Bytes that are read at a time, and hashed while they are in the processor's cache: hashing 1 MiB at a time takes half as long
again. The reads are equally fast."""
_MAX_BUFFERS: Final = 1024  # buffers per preadv, as Linux allows
Progress = Callable[[int], None]
"""Called with the number of bytes that have been read and hashed since the last call, by the thread that requested them."""


class Region(NamedTuple):
    """Bytes ``begin <= i < end`` of a file, and the memory that they are read into; None: they are hashed but not kept."""

    begin: int
    end: int
    target: memoryview | None


class Block(NamedTuple):
    """A damaged block: bytes ``begin <= i < end`` of the file are not those that were saved."""

    number: int
    begin: int
    end: int

    def __str__(self) -> str:
        return (
            f"the bytes do not match their XXH3-128 digest in block {self.number} (bytes {self.begin} to {self.end - 1}): "
            "the file was altered or torn"
        )


@contextmanager
def open_rank_file(directory: Path, file: FileEntry) -> Iterator[int]:
    """Context manager: open a rank file, check its size, and yield its descriptor, which is closed at the end. An ``OSError``
    or ``CheckpointError`` here or in the with block is raised as a ``CheckpointError`` that names the path."""
    path = directory / file.name
    fd = -1
    try:
        fd = open_regular(path)
        size = os.fstat(fd).st_size
        if size != file.size:
            raise CheckpointError(f"{size} bytes, the manifest says {file.size}: truncated or replaced", code=DAMAGED)
        yield fd
    except OSError as error:
        raise read_error(path, error) from error
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.detail}", code=error.code) from None
    finally:
        if fd >= 0:
            os.close(fd)


def overlapping_blocks(file: FileEntry, ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the numbers of the blocks that contain any byte ``begin <= i < end`` of ``ranges``, ascending."""
    size = file.block_size
    return sorted({n for begin, end in ranges if begin < end for n in range(begin // size, (end - 1) // size + 1)})


def every(file: FileEntry) -> range:
    """Return the numbers of all blocks of a file."""
    return range(len(file.blocks))


def read_blocks(
    fd: int,
    file: FileEntry,
    regions: Sequence[Region],
    blocks: Sequence[int],
    progress: Progress | None = None,
    *,
    threads: int = 1,
    stop_at_first: bool = False,
) -> list[Block]:
    """Read and verify the blocks with the numbers ``blocks``, ascending, into the targets of ``regions``. Returns the damaged
    blocks; their bytes are in the targets, too.

    ``regions`` cover the file from its first byte to its last without gaps. Up to ``threads`` threads, the caller's included,
    read a block each, with ``CHUNK`` bytes of memory. ``stop_at_first``: no block is begun after a damaged one, and only the
    first damaged one is returned. Raises ``CheckpointError`` for a file that ends early, and ``OSError``.
    """
    reading = _Reading(fd, file, regions, progress, stop_at_first)
    _advise(fd, file, blocks)
    try:
        found = parallel_map(blocks, reading.make_reader, threads)
    except _Found as one:
        return [one.block]
    reading.report_progress()
    return [block for block in found if block is not None]


class _Found(Exception):
    """Raised by a thread that has read a damaged block, to end the reading of the others. ``read_blocks`` catches it."""

    def __init__(self, block: Block) -> None:
        super().__init__(str(block))
        self.block = block


class _Reading:
    """Reads blocks of one file, in several threads. ``progress`` is called only in the thread that created this object."""

    def __init__(
        self, fd: int, file: FileEntry, regions: Sequence[Region], progress: Progress | None, stop_at_first: bool
    ) -> None:
        self._fd, self._file, self._regions, self._progress, self._stop_at_first = (
            fd,
            file,
            regions,
            progress,
            stop_at_first,
        )
        self._starts = [region.begin for region in regions]
        self._caller_thread, self._lock, self._unreported = threading.get_ident(), threading.Lock(), 0

    def make_reader(self, is_cancelled: IsCancelled) -> Callable[[int], Block | None]:
        """Return a function for one thread, with a scratch buffer of its own. The function reads the block of the number that
        it gets and returns the block if it is damaged. It returns None if the block is intact or ``is_cancelled`` returns
        True. With ``stop_at_first`` it raises ``_Found`` for a damaged block."""
        scratch = memoryview(bytearray(min(CHUNK, self._file.size)))
        return lambda number: self._read(number, scratch, is_cancelled)

    def report_progress(self, count: int = 0) -> None:
        """Add ``count`` bytes to those that have been read and hashed. In the thread that created this object, also pass all
        bytes not yet reported to ``progress``."""
        if self._progress is None:
            return
        with self._lock:
            self._unreported += count
            if threading.get_ident() != self._caller_thread:
                return
            count, self._unreported = self._unreported, 0
        if count:
            self._progress(count)

    def _read(self, number: int, scratch: memoryview, is_cancelled: IsCancelled) -> Block | None:
        """Read one block into the targets of the regions and compare its digest. Returns the block if it is damaged; None if
        it is intact or ``is_cancelled``. Raises ``_Found`` instead if the search stops at the first."""
        size, digests = self._file.block_size, self._file.blocks
        begin, end = number * size, min((number + 1) * size, self._file.size)
        hasher = xxhash.xxh3_128()
        for first in range(begin, end, CHUNK):
            if is_cancelled():
                return None
            last = min(first + CHUNK, end)
            parts = _targets(self._regions, self._starts, first, last, scratch)
            _fill(self._fd, first, last, parts)
            for part in parts:
                hasher.update(part)
            self.report_progress(last - first)
        if hasher.hexdigest() == digests[number]:
            return None
        block = Block(number, begin, end)
        if self._stop_at_first:
            raise _Found(block)
        return block


def _targets(
    regions: Sequence[Region], starts: Sequence[int], begin: int, end: int, scratch: memoryview
) -> list[memoryview]:
    """Return the memory for the bytes ``begin <= i < end`` of the file, in order; bytes of a region without a target go to
    ``scratch``, which must be at least ``end - begin`` bytes long. ``starts``: where each region begins."""
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
    """Read bytes ``offset <= i < end`` of the file into ``parts`` until all are full. Raises ``CheckpointError`` if the file
    ends early, and ``OSError``."""
    at, skip = 0, 0  # the first part that is not full, and how much of it is filled
    while offset < end:
        batch = parts[at : at + _MAX_BUFFERS]
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
    """If all blocks of the file are to be read, tell the system that it is read from front to back, so that it may read far
    ahead. Errors are ignored."""
    if len(blocks) == len(file.blocks) and hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
