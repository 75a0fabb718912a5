"""Holes in files: disk space in the middle of a file is freed, while its size and every offset stay."""

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
    """Free the disk space of the whole granules within the bytes ``begin <= i < end``, which then read as zeros. Return the
    bytes freed. Raise ``OSError``, with ``EOPNOTSUPP`` where that is not possible."""
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
    """Return why holes cannot be used in files in ``directory``, from a trial with a small file; None: they can."""
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
    """Return the offset, at or after ``offset``, where data begins; None: there is none. Moves the descriptor's position."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        if error.errno == errno.EINVAL:  # the file system does not support holes
            return offset if offset < os.fstat(fd).st_size else None
        raise


def hole_after(fd: int, offset: int) -> int:
    """Return the offset of the next hole after ``offset``, or the file's size if there is no hole. ``offset`` must be within
    data. Moves the descriptor's position."""
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENXIO):
            return os.fstat(fd).st_size
        raise
