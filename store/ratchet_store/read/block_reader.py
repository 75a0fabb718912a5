"""Read requested blocks of a rank file into memory, and verify each against its digest."""

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
    """Bytes ``begin <= i < end`` of a file. ``target``: the memory into which they are read; None: they are not kept."""

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
    """Context manager: open a rank file, check its size and yield its descriptor. An ``OSError`` in the block becomes a
    ``CheckpointError``."""
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
    """Read and verify the blocks whose numbers are ``blocks``, and return the damaged ones. ``regions``: together the whole
    file, with the memory for its bytes. ``stop_at_first``: end at a damaged block, and return only this block. Raises
    ``CheckpointError`` if the file ends early, and ``OSError``."""
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
        """Return a function, for one thread, that reads and verifies the block of a given number."""
        scratch = memoryview(bytearray(min(CHUNK, self._file.size)))
        return lambda number: self._read(number, scratch, is_cancelled)

    def report_progress(self, count: int = 0) -> None:
        """Count ``count`` more bytes as read. In the thread that created this object, report all bytes not yet reported."""
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
        """Read one block into its target memory and verify it. A damaged block is returned or, if ``stop_at_first`` was set,
        raised as ``_Found``. Returns None if the block is intact, or if reading was cancelled."""
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
    """Return the memory for the bytes ``begin <= i < end`` of the file; bytes without a target go to ``scratch``."""
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
    """Read bytes ``offset <= i < end`` of the file into ``parts``. Raises ``CheckpointError`` if the file ends early."""
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
    """If all blocks are to be read, tell the system that the file is read from front to back."""
    if len(blocks) == len(file.blocks) and hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
