"""A file's bytes onto the disk, block by block, each with its digest; past the page cache where the system can do that.

A write through the page cache costs the processor a copy into pages that the system has to find first, and in a virtual machine
now and then ten times as much, all of it taken from the training beside it. With ``O_DIRECT`` (open(2)) the disk takes the bytes
where they lie: their address, their place in the file and their length must be whole pages. What is not, a file's last bytes, and
everything where the system refuses (a file system without, memory that lies otherwise), goes through the page cache.
"""

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

from ratchet_store.files import start_writeback

BLOCK: Final = 16 << 20  # bytes of the file under one digest: what a reader reads at least
PAGE: Final = 4096  # bytes; no system asks for more
CHUNK: Final = 1 << 20  # through the page cache: hashed, and written while still in the processor's; divides a block
REQUEST: Final = 2 << 20
"""Bytes of a write past it, at the least. A disk that takes them at once is given twice as many: behind each write the thread
needs Python's lock again, for which a training waits. Until a write ends nobody sees that a slow disk gets on, so that one is
given no more than it takes in some ``_AT_ONCE``, and one that has become slow less with every write."""
_MOST: Final = 4  # times REQUEST: more is hardly faster
_AT_ONCE: Final = 0.05  # seconds, those included in which the thread waits for Python's lock
_WRITEBACK: Final = 8 << 20  # bytes after which the disk is told to begin: write + fsync then take about half the time
_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_REFUSED: Final = frozenset({errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP})
_NOTHING: Final = xxhash.xxh3_128_hexdigest(b"")
Range = tuple[int, int]


class Blockwise:
    """Writes ``head``, whole pages, and ``data`` behind it to ``fd``, which is empty. ``work`` in one thread or several, then
    ``finish`` once. ``block``: bytes under one digest. ``ranges``: bytes ``begin <= i < end`` of ``data``, without overlaps,
    which have a digest of their own, too: made when they are in the processor's cache, where that costs half as much."""

    def __init__(self, fd: int, head: bytes, data: memoryview, block: int, ranges: Sequence[Range] = ()) -> None:
        self._fd, self._head, self._data, self._block = fd, head, data, block
        self.size = len(head) + len(data)
        self._ranges, self._of_ranges = self._by_block(ranges), [_NOTHING] * len(ranges)
        self._left: Iterator[int] = iter(range(-(-self.size // block)))
        self._digests: dict[int, str] = {}
        self._error: BaseException | None = None
        self._working = 0
        self._changed = threading.Condition()
        self._pages = len(data) // PAGE * PAGE  # bytes of the data
        self._request = REQUEST
        self._direct = self._pages > 0 and _past_page_cache(fd, on=True)

    def work(self) -> None:
        """Write blocks, until there is none that nobody has begun: others may still be at theirs when this returns. ``finish``
        raises what fails."""
        while (number := self._next()) is not None:
            digest, failed = "", None
            try:
                digest = self._write(number)
            except BaseException as error:  # of whichever thread
                failed = error
            self._ended(number, digest, failed)
            del failed  # whose traceback holds this frame

    def finish(self) -> tuple[list[str], list[str]]:
        """Wait for all who work, and write what is left; the digests in hex of the blocks, and of the ranges. Nothing is synced.
        Raises ``OSError``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._working)
            error, self._error = self._error, None
            self._left = iter(())  # who comes late finds nothing, also behind an error
        if error is not None:
            try:
                raise error
            finally:
                del error
        self._through_page_cache()
        self._put(memoryview(self._head), 0)
        self._put(self._data[self._pages :], len(self._head) + self._pages)
        return [self._digests[number] for number in sorted(self._digests)], self._of_ranges

    def _by_block(self, ranges: Sequence[Range]) -> dict[int, list[tuple[int, int, int]]]:
        """Begin, end and number of each that has any bytes, by the block that it begins in, in the order of the data."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        for number, (begin, end) in enumerate(ranges):
            if begin < end:
                found.setdefault((len(self._head) + begin) // self._block, []).append((begin, end, number))
        for some in found.values():
            some.sort()
        return found

    def _next(self) -> int | None:
        with self._changed:
            number = None if self._error is not None else next(self._left, None)
            self._working += number is not None
            return number

    def _ended(self, number: int, digest: str, error: BaseException | None) -> None:
        with self._changed:
            self._working -= 1
            self._error, self._digests[number] = self._error or error, digest
            self._changed.notify_all()

    def _write(self, number: int) -> str:
        """Write what of a block is data and whole pages; the digest of all of it."""
        start, begin, end = len(self._head), number * self._block, min((number + 1) * self._block, self.size)
        hasher = xxhash.xxh3_128(self._head[begin:end])
        at = max(begin, start)
        ranges = deque(self._ranges.get(number, ()))
        while at < end:
            stop = end if self._direct else min(at - at % CHUNK + CHUNK, end)
            self._hash(hasher, at - start, stop - start, ranges)
            self._put(self._data[at - start : min(stop - start, self._pages)], at)
            if not self._direct and (stop % _WRITEBACK == 0 or stop == end):
                start_writeback(self._fd, begin, stop - begin)
            at = stop
        return hasher.hexdigest()

    def _hash(self, hasher: xxhash.xxh3_128, at: int, stop: int, ranges: deque[tuple[int, int, int]]) -> None:
        """Bytes of the data, and the ranges that begin in them. One that goes on in another block is read twice."""
        while ranges and ranges[0][0] < stop:
            begin, end, number = ranges.popleft()
            middle = min(end, stop)
            hasher.update(self._data[at:middle])
            self._of_ranges[number] = xxhash.xxh3_128_hexdigest(self._data[begin:end])
            at = middle
        hasher.update(self._data[at:stop])

    def _put(self, data: memoryview, offset: int) -> None:
        while data:
            direct, most, begin = self._direct, self._request, time.monotonic()
            try:
                count = os.pwrite(self._fd, data[:most] if direct else data, offset)
            except OSError as error:
                if not direct or error.errno not in _REFUSED:
                    raise
                self._through_page_cache()  # also behind a write that ended early, within a page
                continue
            data, offset = data[count:], offset + count
            if time.monotonic() - begin >= _AT_ONCE:
                self._request = max(most // 2, REQUEST)
            elif count == most:
                self._request = min(2 * most, _MOST * REQUEST)

    def _through_page_cache(self) -> None:
        with self._changed:
            if self._direct:
                _past_page_cache(self._fd, on=False)
                self._direct = False


def _past_page_cache(fd: int, *, on: bool) -> bool:
    """Does a descriptor now write past the page cache, as is wanted? Fewer systems can than cannot, so that is no error."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
        return on and _O_DIRECT != 0
    return False
