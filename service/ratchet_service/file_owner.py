"""A job's directory belongs to the user that its code runs as, so what the service does in it, it does as that user.

Were it done as root, a link that user code puts in the place of a log, a mark or a directory would have the service read or write
what only root may. The kernel checks file accesses of a thread by its file system user: inside ``as_owner`` that is the owner of
the job's directory, which lies in one of the service's own, so that only the service gives it away. Where the service is not
root, or the directory is root's, nothing changes.

The rights are the thread's, so a block that is left standing would lend them to whatever comes next there. It is refused where an
event loop runs, whose other tasks would have them; no database is asked within (``refuse_within``: SQLite opens its files when it
likes), which also tells a thread that was started within, or in which a generator stands still within; and a block must end in
the thread that began it, inner ones first.
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
from ratchet_service.confined import User

MOST_NAMES: Final = 200_000
"""Of a directory that user code writes to; a tenth of a second of a core."""


@contextmanager
def as_owner(path: Path) -> Iterator[None]:
    """While the block runs, this thread's file accesses are those of the owner of the job whose directory ``path`` is, or lies
    in. Not around a ``yield``. A thread that is started within keeps these rights. Raises ``PermissionError`` where the kernel
    does not change the user, ``RuntimeError`` where the rights would leak."""
    owner = owner_of(path) if os.geteuid() == 0 else None
    if owner is None or owner[0] == 0:
        yield
        return
    with _acting(*owner):
        yield


@contextmanager
def as_user(user: User | None) -> Iterator[None]:
    """Likewise as ``user``; None: as the service."""
    if user is None:
        yield
        return
    with _acting(user.uid, user.gid):
        yield


@contextmanager
def as_service() -> Iterator[None]:
    """Within ``as_owner``, or in a thread that was started there and has taken over its rights: the service's own again."""
    if os.geteuid() != 0:
        yield
        return
    with _acting(0, os.getegid()):
        yield


@contextmanager
def _acting(uid: int, gid: int) -> Iterator[None]:
    if _in_event_loop():
        raise RuntimeError(
            "files are opened as another user in a thread of its own: other tasks of this loop would be that user"
        )
    before, thread = _present(), threading.get_ident()
    _become(uid, gid)
    if _present() != (uid, gid):
        _become(*before)
        raise PermissionError(f"files cannot be opened as user {uid}, group {gid}")
    try:
        yield
    finally:
        if threading.get_ident() != thread or _present() != (uid, gid):
            raise RuntimeError(f"a block as user {uid} was left by another thread, or before one within it")
        _become(*before)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _become(uid: int, gid: int) -> None:
    _libc().setfsgid(gid)
    _libc().setfsuid(uid)


def _present() -> tuple[int, int]:
    """User and group that this thread's file accesses have."""
    return _libc().setfsuid(-1), _libc().setfsgid(-1)


def refuse_within() -> None:
    """Raises ``RuntimeError`` in a thread whose file accesses are another user's than the service's."""
    if os.geteuid() == 0 and (uid := _present()[0]) != 0:
        raise RuntimeError(
            f"this thread opens files as user {uid}: what is to be done as the service is done outside ``as_owner``"
        )


def foreign(path: Path) -> bool:
    """Do the files of the job in whose directory ``path`` lies belong to another user than the service's? Then that user decides
    what the service can open of them, and may have taken it all away: that must not keep the attempt from being ended."""
    owner = owner_of(path)
    return owner is not None and owner[0] != os.geteuid()


def owner_of(path: Path) -> tuple[int, int] | None:
    """User and group of the job's directory that ``path`` is, or lies in; None where there is none, and in a run directory that
    was never made ready for another user (``worker_user.settle``), who could not even reach it."""
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
    """A file of a job's, by its owner's rights. Raises ``OSError``, ``PermissionError`` for what is no regular file, and might
    never begin (a FIFO) or never end (``/dev/zero``), and for a link where the job's code has a user of its own: by
    ``/proc/self`` it leads to what the service itself has open."""
    link = os.O_NOFOLLOW if foreign(path) else 0
    try:
        with as_owner(path):
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | link)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PermissionError(f"{path} is a link") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PermissionError(f"{path} is no regular file")
    return os.fdopen(fd, "rb")


def replace_file(path: Path, text: str) -> None:
    """Write a job's file by rename, so that what user code has put at ``path``, a link or a FIFO, is replaced and not followed.
    Readable by the owner alone. Call it within ``as_owner``; the name is durable after an ``fsync_dir`` of the parent."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    with os.fdopen(fd, "w") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    Path(temporary).rename(path)


def names_in(folder: Path, most: int = MOST_NAMES) -> list[str]:
    """At most ``most`` names of the directory, in no order; none where it is not there, or not to be listed. Call it within
    ``as_owner``. User code may have made millions of files where a handful belong: what is beyond ``most`` is not looked at."""
    try:
        with os.scandir(folder) as found:
            return [entry.name for entry in islice(found, max(0, most))]
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def give(root: Path, uid: int, gid: int) -> None:
    """Make the job's directory ``root``, or hand it over with all that is in it: what the service's own user, or the worker's
    user before, had made there. Raises ``OSError``, also for what is another's: user code may have linked it there."""
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
                os.chown(f"/proc/self/fd/{inner}", uid, gid)  # what was looked at, whatever has that name by now
            finally:
                os.close(inner)
    os.chown(root, uid, gid)  # last: a walk that was cut short begins again
