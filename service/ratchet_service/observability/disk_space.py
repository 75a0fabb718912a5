"""Messages about a full disk, and a file that reserves space for deletions."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from sqlalchemy.exc import DBAPIError

from ratchet_contract.errors import Refused
from ratchet_contract.paths import HomePaths
from ratchet_service.db.engine import Database

CODE: Final = "disk-full"
_FULL_ERRNOS: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_MIN_FREE_BYTES: Final = 64 * 1024
"""With less free bytes than this, SQLite cannot write its log. It may report that as an I/O error."""

_RESERVE_BYTES: Final = 1024 * 1024
"""Bytes kept for a deletion: the pages that it changes are written to SQLite's log before any space is freed."""


def reserve_space(database: Database) -> None:
    """Create a file next to a SQLite database, if possible, to have space for a deletion when the disk is full."""
    path = _reserve_file(database)
    if path is None or path.exists() or (free_bytes(path.parent) or 0) < _RESERVE_BYTES + _MIN_FREE_BYTES:
        return
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE_BYTES)
    except OSError:
        with suppress(OSError):
            path.unlink()


def release_space(database: Database) -> bool:
    """Delete the file that ``reserve_space`` created, to free its space. Return False if nothing was deleted."""
    path = _reserve_file(database)
    try:
        if path is not None:
            path.unlink()
    except OSError:
        return False
    return path is not None


def database_disk_full(database: Database) -> Refused | None:
    """Return (not raise) the error for a full disk if the SQLite database's disk is full now, as far as is known."""
    directory = _directory(database)
    free = None if directory is None else free_bytes(directory)
    if directory is None or free is None or free >= _MIN_FREE_BYTES:
        return None
    return disk_full_error(
        directory, "nothing is recorded and no attempt is started or ended; running attempts continue"
    )


def is_disk_full_error(error: BaseException, home: Path) -> bool:
    """True if ``error`` is an ``OSError`` or a database error from a full disk or an exceeded quota. ``home``: the run
    directory."""
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    if not isinstance(error, DBAPIError):
        return False
    text = str(error.orig)
    free = free_bytes(home)
    return (
        "disk is full" in text
        or "No space left on device" in text
        or ("disk I/O error" in text and free is not None and free < _MIN_FREE_BYTES)
    )


def disk_full_error(directory: Path, consequence: str, needed: int | None = None) -> Refused:
    """Return (not raise) the error for a full disk. ``consequence``: the clause of the error's text that says what is not done
    now. ``needed``: the number of bytes that are needed; None: unknown."""
    free = free_bytes(directory)
    figures = [
        f"{format_mebibytes(size)} {word}" for size, word in ((free, "free"), (needed, "needed")) if size is not None
    ]
    text = (
        f"the disk of {directory} is full ({', '.join(figures)}): {consequence}. Free space there (`ratchet delete JOB` "
        "removes the checkpoints of a job that has ended, a smaller checkpoint.keep_last keeps fewer), "
        "or start the service with "
        "another --home"
    )
    return Refused(text, code=CODE)


def _directory(database: Database) -> Path | None:
    """Return the directory of a SQLite database and its log; None for a database server."""
    return Path(database.url.database).parent if database.is_sqlite and database.url.database else None


def _reserve_file(database: Database) -> Path | None:
    """Return the path of the file that ``reserve_space`` creates; None for a database server."""
    directory = _directory(database)
    return None if directory is None else HomePaths(directory).database_reserve


def free_bytes(directory: Path) -> int | None:
    """Return the bytes in the file system of ``directory`` that an unprivileged process may use; None if unknown."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def format_mebibytes(size: int) -> str:
    """Return the size in bytes as a text like ``0.3 MiB``."""
    return f"{size / 2**20:.1f} MiB"
