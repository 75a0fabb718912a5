"""System calls of the store, and codes of ``CheckpointError``."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final, cast

from ratchet_contract.errors import CheckpointError

DAMAGED: Final = "checkpoint-damaged"  # the bytes on disk are not those that were committed: quarantine, fall back
MISSING: Final = "checkpoint-missing"  # what was requested is not there: never committed, or deleted
FORMAT: Final = "checkpoint-format"  # written in another format: use the version that wrote it; never fall back
UNREADABLE: Final = "checkpoint-unreadable"  # the system refused to read or delete: nothing is proved; never fall back
NOT_WRITTEN: Final = "checkpoint-not-written"  # the save failed: older checkpoints are untouched
EXISTS: Final = "checkpoint-exists"  # another checkpoint is already there, or it is being deleted

_DIRECTORY_FLAGS: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_SLICE: Final = 1 << 20
"""Bytes whose write-back is waited for at once: a second on a disk of 1 MB/s."""
_SHOW_SECONDS: Final = 0.5
"""Between two changes of a file's time of modification: on a fast disk there is none."""
_NO_SUCH_CALL: Final = frozenset({errno.ENOSYS, errno.EPERM})  # of the kernel, or of a container's filter of calls
_MISSING_ERRNOS: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO})


def write_error(path: Path, error: OSError, needed_bytes: int | None = None) -> CheckpointError:
    """Return the ``CheckpointError`` to raise after a failed write, with advice for the user. ``needed_bytes``: the file's
    size, if known."""
    advice = {
        errno.ENOSPC: "the disk is full: free space, lower checkpoint.keep_last, or move the run directory",
        errno.EDQUOT: "the disk quota is used up: free space, lower checkpoint.keep_last, or raise the quota",
        errno.EFBIG: "the file is larger than the file system or the process limit allows (ulimit -f, or file_size of "
        "the service's --run-as-limits)",
        errno.EROFS: "the file system is mounted read-only: check the kernel log for the reason",
        errno.EIO: "the disk reported an input/output error: check the kernel log, do not trust this disk",
        errno.EACCES: "the process may not write there: check owner and mode",
    }.get(error.errno or 0, "check the file system")
    return CheckpointError(
        f"checkpoint file {path} was not written: {error.strerror or error}; "
        f"{advice}{_space_text(path, error, needed_bytes)}. Older "
        "checkpoints are untouched.",
        code=NOT_WRITTEN,
    )


def _space_text(path: Path, error: OSError, needed_bytes: int | None) -> str:
    """Return a text in parentheses with free and needed space, as far as known; empty if ``error`` is not about lack of space."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    notes = [f"{needed_bytes / 2**20:.1f} MiB needed for this file alone"] if needed_bytes is not None else []
    nearest = next((folder for folder in path.parents if folder.is_dir()), None)
    # with a quota, the disk's free space says nothing
    if error.errno == errno.ENOSPC and nearest is not None:
        found = os.statvfs(nearest)
        notes.insert(0, f"{found.f_bavail * found.f_frsize / 2**20:.1f} MiB free")
    return f" ({', '.join(notes)})" if notes else ""


def read_error(path: Path, error: OSError) -> CheckpointError:
    """Return the ``CheckpointError`` to raise after a failed read: ``checkpoint-damaged`` if ``error`` says that there
    is not a regular file, otherwise ``checkpoint-unreadable``."""
    if error.errno in _MISSING_ERRNOS:
        return CheckpointError(f"{path} is missing or not a plain file", code=DAMAGED)
    return CheckpointError(
        f"{path} cannot be read: {error.strerror or error}; check permissions and the disk, then try again. "
        "No older checkpoint was used instead.",
        code=UNREADABLE,
    )


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Ask the system to start writing these bytes of a file to the disk; ``fsync`` must still follow. May block. Does nothing
    where Linux's ``sync_file_range`` is missing."""
    call = _sync_file_range()
    if call is not None:
        call(fd, offset, nbytes, 2)


def wait_for_writeback(fd: int, nbytes: int) -> None:
    """Wait until the system has written the file's first ``nbytes`` bytes to the disk; ``fsync`` must still follow. If that
    takes long, the file's time of modification changes, after parts of ``_SLICE`` bytes and at most every ``_SHOW_SECONDS``, so
    that other processes see progress. Does nothing where Linux's ``sync_file_range`` is missing. Raise ``OSError`` for an error
    of the disk, which ``fsync`` would not report a second time."""
    call, shown = _sync_file_range(), time.monotonic()
    for offset in range(0, nbytes if call is not None else 0, _SLICE):
        if call is not None and call(fd, offset, _SLICE, 1 | 2 | 4) != 0:  # wait before, write, wait after
            if (code := ctypes.get_errno()) in _NO_SUCH_CALL:
                return
            raise OSError(code, os.strerror(code))
        if (now := time.monotonic()) - shown >= _SHOW_SECONDS:
            os.utime(fd)
            shown = now


@cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Return the C library's ``sync_file_range``; None where there is none."""
    try:
        call = ctypes.CDLL(None, use_errno=True).sync_file_range
    except (AttributeError, OSError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return cast("Callable[[int, int, int, int], int]", call)


def refresh(path: Path) -> None:
    """Make a network file system's client ask its server about ``path``, by Linux's ``statx``. Errors are ignored."""
    call = _statx()
    if call is not None:
        call(
            -100, os.fsencode(path), 0x2000, 0x7FF, ctypes.create_string_buffer(256)
        )  # AT_FDCWD, ..., STATX_BASIC_STATS


@cache
def _statx() -> Callable[[int, bytes, int, int, ctypes.Array[ctypes.c_char]], int] | None:
    """Return the C library's ``statx``; None where there is none."""
    try:
        call = ctypes.CDLL(None).statx
    except (AttributeError, OSError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
    return cast("Callable[[int, bytes, int, int, ctypes.Array[ctypes.c_char]], int]", call)


def open_regular(path: Path) -> int:
    """Open a regular file for reading, and return the descriptor, which the caller must close. Raise ``OSError`` if ``path``
    is not a regular file, also for a link to one."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    except BaseException:
        os.close(fd)
        raise
    return fd


def remove_tree(folder: Path) -> None:
    """Delete a directory with its content, of any modes and depth; links are not followed. A missing one is not an error. Raise
    ``OSError``."""
    try:
        here = _open_for_removal(folder)
    except FileNotFoundError:
        return
    # For each level down to ``here``: its name, the names left in its parent, and the parent's identity.
    way: list[tuple[str, list[str], tuple[int, int]]] = []
    try:
        left = _remove_files(here)
        while way or left:
            if left:
                name = left.pop()
                try:
                    inner = _open_for_removal(name, here)
                except FileNotFoundError:
                    continue
                way.append((name, left, _identity(here)))
                os.close(here)
                here = inner
                left = _remove_files(here)
                continue
            outer = os.open("..", _DIRECTORY_FLAGS, dir_fd=here)
            os.close(here)
            here = outer
            name, left, expected = way.pop()
            if _identity(here) != expected:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(folder))
            with suppress(FileNotFoundError):
                os.rmdir(name, dir_fd=here)
    finally:
        os.close(here)
    with suppress(FileNotFoundError):
        folder.rmdir()


def _open_for_removal(name: Path | str, parent: int | None = None) -> int:
    """Open a directory of any mode, which becomes 0700, so that its content can be deleted. Raise ``OSError``."""
    try:
        fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
    # a privileged process never comes here: by name it might change what a link of user code points to
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)
        fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=parent)
    try:
        os.fchmod(fd, 0o700)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _identity(fd: int) -> tuple[int, int]:
    """Return device and inode of an open file."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _remove_files(fd: int) -> list[str]:
    """Delete all entries of the directory ``fd`` except directories. Returns the names of the directories."""
    with os.scandir(fd) as found:
        entries = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in found]
    for name, is_dir in entries:
        if not is_dir:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
    return [name for name, is_dir in entries if is_dir]
