"""Holes in files: the middle of a file is returned to the file system while its ends, its size and every offset stay."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path
from typing import Final

GRANULE: Final = 64 * 1024
"""Alignment of holes in bytes: a multiple of every usual file system's block size."""
_KEEP_SIZE: Final = 1  # linux/falloc.h
_PUNCH_HOLE: Final = 2
_libc = ctypes.CDLL(None, use_errno=True)


def punch_hole(path: Path, begin: int, end: int) -> int:
    """Free the disk space of the whole granules (``GRANULE`` bytes) within the bytes ``begin <= i < end``; they read as zeros
    from then on. A process that has the file open may continue to write elsewhere in it.

    Returns the number of bytes of disk space that were freed: 0 if no whole granule lies within, or only holes. Raises
    ``OSError``, with ``EOPNOTSUPP`` where the file system cannot do it.
    """
    first, last = -(-begin // GRANULE) * GRANULE, end // GRANULE * GRANULE
    if last <= first:
        return 0
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        before = os.fstat(fd).st_blocks
        call = _libc.fallocate
        call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        while call(fd, _KEEP_SIZE | _PUNCH_HOLE, first, last - first) != 0:
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number), str(path))
        return max(0, before - os.fstat(fd).st_blocks) * 512
    finally:
        os.close(fd)


def unsupported_reason(directory: Path) -> str | None:
    """Return None if ``punch_hole`` frees space in files in ``directory``, and readers can skip the holes (``SEEK_DATA``);
    otherwise a text on what does not work, for example that the disk is full. It is tried with a small file there, which is
    removed."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".holes-") as scratch:
            scratch.write(b"x" * (3 * GRANULE))
            scratch.flush()
            os.fsync(scratch.fileno())
            freed = punch_hole(Path(scratch.name), GRANULE, 2 * GRANULE)
            seen = os.lseek(scratch.fileno(), GRANULE, os.SEEK_DATA)
    except OSError as error:
        return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})"
    if seen != 2 * GRANULE:
        return "it does not report holes to readers"
    return None if freed else "it frees no space"


def data_after(fd: int, offset: int) -> int | None:
    """Return the offset, at or after ``offset``, where data begins; None if only a hole or nothing follows up to the end of the
    file. Without support for holes, the whole file is data. Moves the descriptor's position."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        if error.errno == errno.EINVAL:  # the file system does not support holes
            return offset if offset < os.fstat(fd).st_size else None
        raise


def hole_after(fd: int, offset: int) -> int:
    """Return the offset where the next hole after ``offset`` begins; without a hole, the file's size. ``offset`` must lie in
    data. Moves the descriptor's position."""
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENXIO):
            return os.fstat(fd).st_size
        raise
