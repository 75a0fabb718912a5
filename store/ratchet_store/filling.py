"""The directory that a fetch fills, beside the checkpoints: gone with the fetch, and soon after one that was killed."""

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
_YOUNG: Final = 60.0
"""Seconds within which a fetch has locked its directory."""
_STALE: Final = 7 * 86400.0
"""Where the file system knows no locks: seconds after which no fetch can still go on."""


@contextmanager
def filling(checkpoints: Path, folder: str) -> Iterator[Path]:
    """A new directory for the files of ``folder``, which ``done`` makes ready to be renamed; else it is removed at the end.
    Raises ``OSError``."""
    _sweep(checkpoints)
    place = checkpoints / f"{_PREFIX}{folder}.{os.getpid()}.{time.monotonic_ns()}"
    place.mkdir()
    fd = -1
    try:
        fd = os.open(place / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        with suppress(OSError):  # none here: then it is old age that tells
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield place
    finally:
        if fd >= 0:
            os.close(fd)
        if place.is_dir():
            shutil.rmtree(place, ignore_errors=True)


def done(place: Path) -> None:
    """Nothing but the checkpoint's files is left in it. Raises ``OSError``."""
    (place / _LOCK).unlink()


def _sweep(checkpoints: Path) -> None:
    """Fetches that were cut short: each is as large as a checkpoint."""
    for left in checkpoints.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or another user's
            age = time.time() - left.stat().st_mtime
            if age > _STALE or (age > _YOUNG and _is_abandoned(left)):
                shutil.rmtree(left, ignore_errors=True)


def _is_abandoned(left: Path) -> bool:
    """Its lock can be had: its process is dead. Raises ``OSError``: it holds the lock, or nothing can be told."""
    fd = os.open(left / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(fd)
    return True
