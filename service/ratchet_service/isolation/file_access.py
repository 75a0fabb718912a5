"""File accesses in a job's directory, made as the user that the job's code runs as.

If they were made as root, user code could replace a log, a marker file or a directory with a link, and the service would read or
write what only root may. The kernel checks a thread's file accesses against its file system user (setfsuid(2)). Inside
``as_owner`` that is the owner of the job's directory. The directory's parent belongs to the service, so only the service can
change that owner. Where the service is not root, or the directory is root's, nothing changes.

The rights belong to the thread, so a block that stays open would lend them to whatever the thread runs next. Entering a block
therefore raises where an event loop runs, whose other tasks would have the rights, if the block changes the rights. No database
is used within a block, since SQLite opens its files at any time; ``raise_if_impersonating`` checks this, and so also detects a
thread that was started within a block, or in which a generator is suspended within one. A block must end in the thread that
began it, inner blocks first.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import stat
import tempfile
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
    """During the block, make this thread's file accesses as the owner of a job's directory. ``path``: the job's directory, or a
    path in it. Nothing changes, and nothing is raised, if the service is not root, if the directory is root's, or if ``owner_of``
    returns None. The block must not contain a ``yield``; a thread that is started within it keeps these rights.

    Raises ``PermissionError`` if the kernel does not change the user; ``RuntimeError`` in an event loop, whose other tasks would
    get the rights, and if another thread ends the block, or an outer block ends first."""
    owner = owner_of(path) if os.geteuid() == 0 else None
    if owner is None or owner[0] == 0:
        yield
        return
    with _impersonate(*owner):
        yield


@contextmanager
def as_user(user: User | None) -> Iterator[None]:
    """As ``as_owner``, with the rights of ``user``; None: nothing changes. Raises ``PermissionError`` also if the service is not
    root and ``user`` is not its own."""
    if user is None:
        yield
        return
    with _impersonate(user.uid, user.gid):
        yield


@contextmanager
def as_service() -> Iterator[None]:
    """During the block, make file accesses with the service's own rights again. For use within ``as_owner``, and in a thread that
    was started there and inherited its rights. If the service is root, raises ``RuntimeError`` as ``as_owner`` does."""
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
    """Raise ``RuntimeError`` if the service is root and this thread makes its file accesses as another user (such as within
    ``as_owner``)."""
    if os.geteuid() == 0 and (uid := _current_fs_user()[0]) != 0:
        raise RuntimeError(
            f"this thread opens files as user {uid}: run the service's own operations outside ``as_owner``"
        )


def is_foreign(path: Path) -> bool:
    """True if a job's files belong to another user than the service's. ``path``: the job's directory, or a path in it. That user
    may have removed the service's access to them; the caller must be able to end the attempt all the same."""
    owner = owner_of(path)
    return owner is not None and owner[0] != os.geteuid()


def owner_of(path: Path) -> tuple[int, int] | None:
    """Return user id and group id of the owner of a job's directory. ``path``: the job's directory, or a path in it. None if
    ``path`` is not in a job's directory, if that directory does not exist, or if the run directory was never prepared for another
    user (``run_as.prepare_run_directory``)."""
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
    """Open a job's file for reading, with the rights of the job's owner. Raises ``OSError``. Raises ``PermissionError`` for
    anything but a regular file: reading a FIFO might never begin, reading ``/dev/zero`` never end. It is also raised if
    ``is_foreign(path)`` and ``path`` itself is a link: a link in ``/proc/self/fd`` leads to files that the service itself has
    open. Links in directories above are followed."""
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


def replace_file(path: Path, text: str) -> None:
    """Write a job's file by rename, so that a link or a FIFO that user code has put at ``path`` is replaced and not followed. The
    file is readable by its owner alone. Called within ``as_owner``. The content is synced; the name is durable only after an
    ``fsync_dir`` of the directory."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    with os.fdopen(fd, "w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    Path(temporary).rename(path)


def names_in(folder: Path, limit: int = MAX_NAMES) -> list[str]:
    """Return at most ``limit`` names in the directory, in no order; empty if it does not exist, is no directory or cannot be
    read. Called within ``as_owner``. User code may have made millions of files where a handful is expected: names beyond
    ``limit`` are ignored. Raises ``OSError`` for the errors ``OF_THE_SYSTEM``."""
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
    """Create the job's directory ``root`` for this user. If it exists and belongs to another user, hand it over with everything
    in it; if it belongs to this user already, do nothing more. Raises ``OSError``, also if a file in it belongs to a third user:
    user code may have made a link to that file."""
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
