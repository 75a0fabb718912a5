"""Trying a file system: the calls of the commit protocol, in a scratch directory, and what must come of each."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ratchet_store.files import fsync_dir, replacing

_PREFIX: Final = ".ratchet-probe-"
_STALE: Final = 3600.0  # seconds after which a scratch directory is nobody's any more
_UNSUPPORTED: Final = frozenset({errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM})
_EXISTS: Final = frozenset({errno.EEXIST, errno.ENOTEMPTY})


class Unfit(Exception):
    """What the file system did not do; a sentence without its end."""


def probe(directory: Path) -> None:
    """Do in ``directory`` what a save, a resume and a quarantine do; nothing is left. Raises ``Unfit``, and ``OSError`` where the
    trial itself failed for reasons of another kind (no space, no right, input/output error)."""
    _remove_stale(directory)
    scratch = directory / f"{_PREFIX}{secrets.token_hex(8)}"
    scratch.mkdir()
    try:
        _once(scratch)
        _renamed_file(scratch)
        _renamed_directory(scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _once(scratch: Path) -> None:
    """A name is made once."""
    path, flags = scratch / "once", os.O_WRONLY | os.O_CREAT | os.O_EXCL
    os.close(os.open(path, flags, 0o644))
    _refused("O_EXCL made a file that was there already", lambda: os.close(os.open(path, flags, 0o644)))
    _refused("mkdir made a directory that was there already", scratch.mkdir)


def _renamed_file(scratch: Path) -> None:
    """Written, synced, renamed onto nothing and onto a file: whole under its name, and gone under the other one."""
    path = scratch / "file"
    for content in (b"first", b"second, and longer"):
        with _supported("write, fsync and rename of a file"), replacing(path) as fd:
            os.write(fd, content)
        with _supported("fsync of a directory"):
            fsync_dir(scratch)
        found = path.read_bytes()
        if found != content or path.stat().st_size != len(content) or (scratch / "file.tmp").exists():
            raise Unfit(f"rename left {found[:20]!r} where {content!r} was written")


def _renamed_directory(scratch: Path) -> None:
    """A directory moves whole, and never onto one that holds something."""
    one, two = scratch / "one", scratch / "two"
    one.mkdir()
    (one / "inside").write_bytes(b"one")
    with _supported("rename of a directory"):
        one.rename(two)
        fsync_dir(scratch)
    if one.exists() or (two / "inside").read_bytes() != b"one":
        raise Unfit("rename moved a directory in parts")
    one.mkdir()
    with suppress(OSError):  # by whatever word: sshfs says EPERM, mergerfs EXDEV
        one.rename(two)
    if not one.is_dir() or (two / "inside").read_bytes() != b"one":
        raise Unfit("rename put a directory onto one that held something")


class _supported:
    """Errors that say "there is no such thing here" become ``Unfit``."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError) and error.errno in _UNSUPPORTED:
            raise Unfit(f"{self._what} is not possible there: {error.strerror}") from error


def _refused(what: str, act: Callable[[], object]) -> None:
    try:
        act()
    except OSError as error:
        if error.errno in _EXISTS:
            return
        raise
    raise Unfit(what)


def _remove_stale(directory: Path) -> None:
    """What a killed process left."""
    for path in directory.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE:
                shutil.rmtree(path, ignore_errors=True)
