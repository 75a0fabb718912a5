"""The temporary directory that a fetch fills, next to the checkpoints, and renames to the checkpoint's name when it is
complete."""

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
    """Context manager: delete abandoned directories, and yield a new one in ``checkpoints`` for a fetch. At the end it is
    deleted, unless the caller has renamed it."""
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
    """Delete the lock file in a download directory, before the directory is renamed. Raises ``OSError``."""
    (directory / _LOCK).unlink()


def _sweep(checkpoints: Path) -> None:
    """Delete download directories that no fetch uses any more, as far as their locks and ages show. Errors are ignored."""
    for left in checkpoints.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            age = time.time() - left.stat().st_mtime
            if age > _STALE_SECONDS or (age > _LOCK_GRACE_SECONDS and _is_abandoned(left)):
                shutil.rmtree(left, ignore_errors=True)


def _is_abandoned(directory: Path) -> bool:
    """Return True if the directory's lock is free, so that its process is dead. Raises ``OSError`` otherwise."""
    fd = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)
    return True
