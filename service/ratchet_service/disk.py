"""A full disk in words: which directory, how much is free and needed, what makes room."""

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
from ratchet_service.database import Database

CODE: Final = "disk-full"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PAGE: Final = 64 * 1024
"""Bytes: with less than this free, SQLite has no room for its log; it may call that an I/O error."""

_RESERVE: Final = 1024 * 1024
"""Bytes kept for a deletion: the pages that it changes go to SQLite's log before any room is won."""


def reserve(database: Database) -> None:
    """Keep room for a deletion beside a SQLite database; where there is little left already, it is left to others."""
    path = _reserve_file(database)
    if path is None or path.exists() or (free_bytes(path.parent) or 0) < _RESERVE + _PAGE:
        return
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, _RESERVE)
    except OSError:
        with suppress(OSError):
            path.unlink()


def release(database: Database) -> bool:
    """Give the room of ``reserve`` back; False where there was none."""
    path = _reserve_file(database)
    try:
        if path is not None:
            path.unlink()
    except OSError:
        return False
    return path is not None


def without_room(database: Database) -> Refused | None:
    """The database's disk is full now: nothing can be recorded, be it that nobody has tried yet. None: there is room, or the
    disk is that of a database server, which alone knows."""
    directory = _directory(database)
    free = None if directory is None else free_bytes(directory)
    if directory is None or free is None or free >= _PAGE:
        return None
    return full(directory, "nothing is recorded and no attempt is started or ended; what trains goes on")


def is_full(error: BaseException, home: Path) -> bool:
    """Is a full disk what ``error``, of the system or of the database, comes from?"""
    if isinstance(error, OSError):
        return error.errno in _FULL
    if not isinstance(error, DBAPIError):
        return False
    text = str(error.orig)
    free = free_bytes(home)
    return (
        "disk is full" in text
        or "No space left on device" in text
        or ("disk I/O error" in text and free is not None and free < _PAGE)
    )


def full(directory: Path, what: str, needed: int | None = None) -> Refused:
    """The refusal of ``what`` ("the job was not stored"), for the directory that has no room; ``needed``: bytes."""
    free = free_bytes(directory)
    figures = [f"{megabytes(size)} {word}" for size, word in ((free, "free"), (needed, "needed")) if size is not None]
    text = (
        f"the disk of {directory} is full ({', '.join(figures)}): {what}. Make room there (`ratchet delete JOB` takes the "
        "checkpoints of a job that has ended away, a smaller checkpoint.keep_last keeps fewer), or start the service with "
        "another --home"
    )
    return Refused(text, code=CODE)


def _directory(database: Database) -> Path | None:
    """Where a SQLite database and its log grow."""
    return Path(database.url.database).parent if database.is_sqlite and database.url.database else None


def _reserve_file(database: Database) -> Path | None:
    directory = _directory(database)
    return None if directory is None else HomePaths(directory).database_reserve


def free_bytes(directory: Path) -> int | None:
    """For a process without privileges; None where it cannot be found out."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def megabytes(size: int) -> str:
    """``0.3 MiB``."""
    return f"{size / 2**20:.1f} MiB"
