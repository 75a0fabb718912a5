"""Write a file block by block, each with its digest, past the page cache where possible: that takes less processor time from
training."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

import xxhash

from ratchet_store.filesystem.durable_io import start_writeback

BLOCK: Final = 16 << 20  # bytes of the file under one digest: the least that a reader reads
PAGE: Final = 4096  # bytes; no system requires more
CHUNK: Final = 1 << 20  # bytes through the page cache: hashed and written while in the CPU's cache; divides a block
MIN_WRITE_BYTES: Final = 2 << 20
"""Minimum bytes of a write past the page cache, except the last of a block. A disk that accepts them quickly gets twice as many
next: after each write the thread needs the GIL again, for which training waits. The progress of a slow disk is visible only when
a write ends, so a disk that took longer than ``_TARGET_WRITE_SECONDS`` gets half as many next."""
_MAX_WRITE_FACTOR: Final = 4  # times MIN_WRITE_BYTES: more is hardly faster
_TARGET_WRITE_SECONDS: Final = 0.05  # seconds, including the thread's wait for the GIL
_WRITEBACK: Final = 8 << 20  # bytes after which writeback is started: write + fsync then take about half the time
_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_DIRECT_IO_ERRNOS: Final = frozenset({errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP})
_EMPTY_DIGEST: Final = xxhash.xxh3_128_hexdigest(b"")
Range = tuple[int, int]


class Blockwise:
    """Writes ``header`` and ``data`` into the empty file ``fd``, without a sync; ``fd`` None: only computes the digests. Call
    ``work`` in one thread or several, then ``finish``. ``header``: a whole number of pages. ``block``: number of bytes in a
    block, which has one digest. ``ranges``: disjoint parts of ``data`` that get digests of their own."""

    def __init__(
        self, fd: int | None, header: bytes, data: memoryview, block: int, ranges: Sequence[Range] = ()
    ) -> None:
        self._fd, self._header, self._data, self._block = fd, header, data, block
        self.size = len(header) + len(data)
        self._ranges, self._range_digests = self._ranges_by_block(ranges), [_EMPTY_DIGEST] * len(ranges)
        self._remaining_blocks: Iterator[int] = iter(range(-(-self.size // block)))
        self._digests: dict[int, str] = {}
        self._error: BaseException | None = None
        self._working = 0
        self._changed = threading.Condition()
        self._aligned_bytes = len(data) // PAGE * PAGE  # bytes of the data
        self._write_bytes = MIN_WRITE_BYTES
        self._direct = fd is not None and self._aligned_bytes > 0 and _set_direct_io(fd, enabled=True)

    def work(self) -> None:
        """Write blocks of the file until none is left to begin. Errors are raised by ``finish``."""
        while (number := self._take_block()) is not None:
            digest, failed = "", None
            try:
                digest = self._write(number)
            except BaseException as error:  # of any thread
                failed = error
            self._finish_block(number, digest, failed)
            del failed  # whose traceback holds this frame

    def finish(self) -> tuple[list[str], list[str]]:
        """Wait for all threads, write the rest, and return the digests in hex of the blocks and of the ranges. Raises the first
        error of any thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)
            error, self._error = self._error, None
            self._remaining_blocks = iter(())  # a late thread finds nothing, also after an error
        if error is not None:
            try:
                raise error
            finally:
                del error
        self._disable_direct_io()
        self._put(memoryview(self._header), 0)
        self._put(self._data[self._aligned_bytes :], len(self._header) + self._aligned_bytes)
        return [self._digests[number] for number in sorted(self._digests)], self._range_digests

    def _ranges_by_block(self, ranges: Sequence[Range]) -> dict[int, list[tuple[int, int, int]]]:
        """Return begin, end and number of each non-empty range, by the number of the block that it begins in."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for number, (begin, end) in enumerate(ranges):
            if begin < end:
                found.setdefault((len(self._header) + begin) // self._block, []).append((begin, end, number))
        for some in found.values():
            some.sort()
        return found

    def _take_block(self) -> int | None:
        """Return the number of the next block and count this thread as at work; None: no block is to be begun."""
        with self._changed:
            number = None if self._error is not None else next(self._remaining_blocks, None)
            self._working += number is not None
            return number

    def _finish_block(self, number: int, digest: str, error: BaseException | None) -> None:
        """Record a block's digest, or the first error, and count this thread as no longer at work."""
        with self._changed:
            self._working -= 1
            self._error, self._digests[number] = self._error or error, digest
            self._changed.notify_all()

    def _write(self, number: int) -> str:
        """Write the whole pages of data in a block. Returns the digest of the block, bytes of the header included."""
        start, begin, end = len(self._header), number * self._block, min((number + 1) * self._block, self.size)
        hasher = xxhash.xxh3_128(self._header[begin:end])
        at = max(begin, start)
        ranges = deque(self._ranges.get(number, ()))
        while at < end:
            stop = end if self._direct or self._fd is None else min(at - at % CHUNK + CHUNK, end)
            self._hash(hasher, at - start, stop - start, ranges)
            self._put(self._data[at - start : min(stop - start, self._aligned_bytes)], at)
            if self._fd is not None and not self._direct and (stop % _WRITEBACK == 0 or stop == end):
                start_writeback(self._fd, begin, stop - begin)
            at = stop
        return hasher.hexdigest()

    def _hash(self, hasher: xxhash.xxh3_128, at: int, stop: int, ranges: deque[tuple[int, int, int]]) -> None:
        """Hash bytes ``at <= i < stop`` of the data into ``hasher``, and compute the digests of ``ranges`` that begin there."""
        while ranges and ranges[0][0] < stop:
            begin, end, number = ranges.popleft()
            middle = min(end, stop)
            hasher.update(self._data[at:middle])
            # now, while the bytes are in the processor's cache: later it would cost twice as much
            self._range_digests[number] = xxhash.xxh3_128_hexdigest(self._data[begin:end])
            at = middle
        hasher.update(self._data[at:stop])

    def _put(self, data: memoryview, offset: int) -> None:
        """Write ``data`` at ``offset`` of the file, past the page cache if the system accepts that. Raises ``OSError``."""
        while data and self._fd is not None:
            direct, most, begin = self._direct, self._write_bytes, time.monotonic()
            try:
                count = os.pwrite(self._fd, data[:most] if direct else data, offset)
            except OSError as error:
                if not direct or error.errno not in _DIRECT_IO_ERRNOS:
                    raise
                self._disable_direct_io()  # also after a short write that ended within a page
                continue
            data, offset = data[count:], offset + count
            if time.monotonic() - begin >= _TARGET_WRITE_SECONDS:
                self._write_bytes = max(most // 2, MIN_WRITE_BYTES)
            elif count == most:
                self._write_bytes = min(2 * most, _MAX_WRITE_FACTOR * MIN_WRITE_BYTES)

    def _disable_direct_io(self) -> None:
        """Write through the page cache from now on."""
        with self._changed:
            if self._direct and self._fd is not None:
                _set_direct_io(self._fd, enabled=False)
                self._direct = False


def _set_direct_io(fd: int, *, enabled: bool) -> bool:
    """Switch writing past the page cache on or off for a descriptor. Returns True if it has been switched on."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if enabled else flags & ~_O_DIRECT)
        return enabled and _O_DIRECT != 0
    return False
