"""The directory that a fetch fills, next to the checkpoints. A complete one gets the checkpoint's name. Any other is removed at
the end of the fetch. One that a killed fetch left is removed by a later fetch: when it is a minute old if its lock is there and
free, else when it is a week old."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_PREFIX: Final = ".fetching-"
_LOCK: Final = ".lock"
_LOCK_GRACE_SECONDS: Final = 60.0
"""Seconds within which a fetch locks its directory."""
_STALE_SECONDS: Final = 7 * 86400.0
"""If the file system has no locks: seconds after which no fetch can still be running."""


@contextmanager
def open_download_directory(checkpoints: Path, folder: str) -> Iterator[Path]:
    """Context manager: yield a new directory in ``checkpoints`` for the files of the checkpoint ``folder``. It is locked if the
    file system has locks. When the files are complete, the caller calls ``remove_lock`` and renames the directory. If it still
    has its first name at the end of the block, it is deleted with its content. Also deletes what killed fetches left
    (``_sweep``). Raises ``OSError``."""
    _sweep(checkpoints)
    place = checkpoints / f"{_PREFIX}{folder}.{os.getpid()}.{time.monotonic_ns()}"
    place.mkdir()
    fd = -1
    try:
        fd = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # no locks here: then the age decides
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield place
    finally:
        if fd >= 0:
            os.close(fd)
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)


def remove_lock(directory: Path) -> None:
    """Delete the lock file in a download directory, so that it contains only the checkpoint's files and can be renamed. Raises
    ``OSError``."""
    (directory / _LOCK).unlink()


def _sweep(checkpoints: Path) -> None:
    """Delete download directories that are older than ``_LOCK_GRACE_SECONDS`` and whose process is dead, and all older than
    ``_STALE_SECONDS``: each may be as large as a checkpoint. Errors are ignored."""
    for left in checkpoints.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            age = time.time() - left.stat().st_mtime
            if age > _STALE_SECONDS or (age > _LOCK_GRACE_SECONDS and _is_abandoned(left)):
                shutil.rmtree(left, ignore_errors=True)


def _is_abandoned(directory: Path) -> bool:
    """Return True if the directory's lock is free, so that its process is dead. Never returns False: raises ``OSError`` if the
    lock is held, or its state is unknown."""
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)
    return True
