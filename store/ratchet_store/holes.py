"""Holes in files: the middle of a file is given back to the file system while its ends, its size and every offset stay."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from pathlib import Path
from typing import Final

GRANULE: Final = 64 * 1024
"""Bytes to which holes are aligned: a multiple of every usual file system's block."""
_KEEP_SIZE: Final = 1  # linux/falloc.h
_PUNCH_HOLE: Final = 2
_libc = ctypes.CDLL(None, use_errno=True)


def punch(path: Path, begin: int, end: int) -> int:
    """Give bytes ``begin`` to ``end`` back, in whole granules within; they read as zeros from then on. Who has the file open may
    go on writing elsewhere. Returns the bytes of disk that this freed. Raises ``OSError``, ``EOPNOTSUPP`` where the file system
    cannot."""
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


def why_not(directory: Path) -> str | None:
    """None where files in ``directory`` can have holes that give room back and that readers can see; else what is wrong, tried on
    a small file there."""
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".holes-") as scratch:
            scratch.write(b"x" * (3 * GRANULE))
            scratch.flush()
            os.fsync(scratch.fileno())
            freed = punch(Path(scratch.name), GRANULE, 2 * GRANULE)
            seen = os.lseek(scratch.fileno(), GRANULE, os.SEEK_DATA)
    except OSError as error:
        return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, '?')})"
    if seen != 2 * GRANULE:
        return "it does not tell readers where holes are"
    return None if freed else "it gives no room back"


def data_after(fd: int, offset: int) -> int | None:
    """Where data begins at or behind ``offset``; None at the end of the file. A hole that reaches to the end counts as the end:
    what is appended may not be visible yet. Moves the descriptor's position."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        if error.errno == errno.EINVAL:  # the file system knows no holes
            return offset if offset < os.fstat(fd).st_size else None
        raise


def hole_after(fd: int, offset: int) -> int:
    """Where the next hole begins, at the latest the end of the file; ``offset`` lies in data. Moves the descriptor's position."""
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENXIO):
            return os.fstat(fd).st_size
        raise
