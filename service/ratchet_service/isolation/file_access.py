"""File accesses in a job's directory, made with the rights of its owner, so that a link made by user code cannot lead the service
to root's files.

A block such as ``as_owner`` changes the thread's file system user (setfsuid(2)). It must end in the thread that began it, inner
blocks first. The database must not be used within it.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

from ratchet_contract.paths import HomePaths, is_job_id
from ratchet_service.isolation.sandbox import User

MAX_NAMES: Final = 200_000
"""The most entries to list of a directory that user code writes to: listing them takes 0.1 s of one core."""
OF_THE_SYSTEM: Final = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of the disk or of this process, which a later try may not meet; user code does not cause them."""


@contextmanager
def as_owner(path: Path) -> Iterator[None]:
    """During the block, make this thread's file accesses as the owner of the job's directory that ``path`` is or lies in. Nothing
    changes unless this process is root, that owner is not, and the run directory has a record of the jobs' user.

    The block must not contain a ``yield``. Raises ``PermissionError`` if the user cannot be changed, and ``RuntimeError`` within
    an event loop.
    """
    owner = owner_of(path) if os.geteuid() == 0 else None
    if owner is None or owner[0] == 0:
        yield
        return
    with _impersonate(*owner):
        yield


@contextmanager
def as_user(user: User | None) -> Iterator[None]:
    """Like ``as_owner``, with the user id and the first group of ``user``; None: nothing changes. Raises ``PermissionError`` if
    these cannot be set."""
    if user is None:
        yield
        return
    with _impersonate(user.uid, user.gid):
        yield


@contextmanager
def as_service() -> Iterator[None]:
    """During the block, make this thread's file accesses with the service's own rights again, for example within ``as_owner``.
    Raises the errors of ``as_owner``."""
    if os.geteuid() != 0:
        yield
        return
    with _impersonate(0, os.getegid()):
        yield


@contextmanager
def _impersonate(uid: int, gid: int) -> Iterator[None]:
    """During the block, make this thread's file accesses as this user and group. Raises as ``as_owner``."""
    if _in_event_loop():
        raise RuntimeError(
            "open files as another user in a separate thread: other tasks of this event loop would run as that user"
        )
    before, thread = _current_fs_user(), threading.get_ident()
    _set_fs_user(uid, gid)
    if _current_fs_user() != (uid, gid):
        _set_fs_user(*before)
        raise PermissionError(f"files cannot be opened as user {uid}, group {gid}")
    try:
        yield
    finally:
        if threading.get_ident() != thread or _current_fs_user() != (uid, gid):
            raise RuntimeError(f"a block as user {uid} was exited by another thread, or before a nested one")
        _set_fs_user(*before)


def _in_event_loop() -> bool:
    """True if an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _set_fs_user(uid: int, gid: int) -> None:
    """Set user and group of this thread's file accesses. The kernel reports no failure."""
    _libc().setfsgid(gid)
    _libc().setfsuid(uid)


def _current_fs_user() -> tuple[int, int]:
    """Return user and group of this thread's file accesses."""
    return _libc().setfsuid(-1), _libc().setfsgid(-1)


def raise_if_impersonating() -> None:
    """Raise ``RuntimeError`` if this process is root and this thread makes its file accesses as another user."""
    if os.geteuid() == 0 and (uid := _current_fs_user()[0]) != 0:
        raise RuntimeError(
            f"this thread opens files as user {uid}: run the service's own operations outside ``as_owner``"
        )


def is_foreign(path: Path) -> bool:
    """True if, by ``owner_of``, the job's directory that ``path`` is or lies in belongs to another user than the service's."""
    owner = owner_of(path)
    return owner is not None and owner[0] != os.geteuid()


def owner_of(path: Path) -> tuple[int, int] | None:
    """Return user id and group id of the owner of the job's directory that ``path`` is or lies in; None if there is none, or if
    the run directory has no record of the jobs' user."""
    for folder in (path, *path.parents):
        if is_job_id(folder.name):
            if not HomePaths(folder.parent.parent).run_as_file.exists():
                return None
            try:
                found = folder.lstat()
            except FileNotFoundError:
                return None
            return found.st_uid, found.st_gid
    return None


def open_read(path: Path) -> BinaryIO:
    """Open a job's file for reading, with the rights of the job's owner. Raises ``OSError``, also for anything but a regular
    file, and for a symbolic link in a job of another user."""
    # a link into /proc/self/fd would lead to files that the service itself has open
    link = os.O_NOFOLLOW if is_foreign(path) else 0
    try:
        with as_owner(path):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | link)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(f"{path} is a symbolic link") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PermissionError(f"{path} is not a regular file")
    return os.fdopen(fd, "rb")


def names_in(folder: Path, limit: int = MAX_NAMES) -> list[str]:
    """Return at most ``limit`` names in the directory, in no order. Raises ``OSError`` for errors in ``OF_THE_SYSTEM``, such as
    of the disk. After other errors, for example if the directory does not exist, the list is empty. Called within
    ``as_owner``."""
    try:
        with os.scandir(folder) as found:
            return [entry.name for entry in islice(found, max(0, limit))]
    except OSError as error:
        if error.errno in OF_THE_SYSTEM:
            raise
        return []


@cache
def _libc() -> ctypes.CDLL:
    """Return the C library, loaded once."""
    return ctypes.CDLL(None)


def give_to_user(root: Path, uid: int, gid: int) -> None:
    """Make this user the owner of the job's directory ``root``, which is created if it is missing, and of all that it contains.
    Does nothing more if the user owns ``root`` already. Raises ``OSError``, such as for files of third users."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    former = root.lstat().st_uid
    if former == uid:
        return
    root.chmod(0o700)
    for _, folders, files, fd in os.fwalk(root):
        for name in (*folders, *files):
            inner = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                found = os.fstat(inner)
                if found.st_uid not in (former, uid):
                    raise PermissionError(f"{root} holds {name}, which belongs to user {found.st_uid}")
                os.chown(f"/proc/self/fd/{inner}", uid, gid)  # the file that was checked, whatever has that name by now
            finally:
                os.close(inner)
    os.chown(root, uid, gid)  # last, so that an interrupted walk is done again
