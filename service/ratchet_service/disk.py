"""A full disk in words: which directory, how much is free and needed, what makes room."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Final

from sqlalchemy.exc import DBAPIError

from ratchet_contract.errors import Refused
from ratchet_service.database import Database

CODE: Final = "disk-full"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PAGE: Final = 64 * 1024
"""Bytes: with less than this free, SQLite has no room for its log; it may call that an I/O error."""


def without_room(database: Database) -> Refused | None:
    """The database's disk is full now: nothing can be recorded, be it that nobody has tried yet. None: there is room, or the
    disk is that of a database server, which alone knows."""
    if not database.is_sqlite or database.url.database is None:
        return None
    directory = Path(database.url.database).parent
    free = free_bytes(directory)
    if free is None or free >= _PAGE:
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


def free_bytes(directory: Path) -> int | None:
    """For a process without privileges; None where it cannot be found out."""
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def megabytes(size: int) -> str:
    """``0.3 MiB``."""
    return f"{size / 2**20:.1f} MiB"
