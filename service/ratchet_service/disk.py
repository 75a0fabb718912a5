"""A full disk in words: which directory, how much is free and needed, what makes room."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from typing import Final

from sqlalchemy.exc import DBAPIError

from ratchet_contract.errors import Refused

CODE: Final = "disk-full"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_PAGE: Final = 64 * 1024
"""Bytes: with less than this free, what SQLite calls an I/O error is a disk that has no room for its log."""


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
