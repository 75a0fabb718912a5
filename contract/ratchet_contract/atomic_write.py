"""Atomic and durable file writes: a concurrent reader finds the old file or the new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

TMP_SUFFIX: Final = ".tmp"
"""End of the names of temporary files, which a killed process leaves."""


def write_atomic(path: Path, data: bytes, *, durable: bool, mode: int = 0o644) -> None:
    """Write ``data`` to ``path`` as ``atomic_file`` does. Raises ``OSError``."""
    with atomic_file(path, durable=durable, mode=mode) as fd:
        write_all(fd, memoryview(data))


@contextmanager
def atomic_file(path: Path, *, durable: bool, mode: int = 0o644) -> Iterator[int]:
    """Context manager: create a temporary file in the directory of ``path``, with the permissions ``mode`` less the umask, and
    yield its descriptor. At the end of the block the file is renamed to ``path``; an existing file or link there is replaced.
    After an error the temporary file is deleted. ``durable``: bytes and name are on the disk when the block has ended. Raises
    ``OSError``; if the directory cannot be synced, the file has its new name, but a loss of power may undo that."""
    # Random and exclusive: several processes and threads may write one path, also where another user may create names.
    tmp = path.with_name(f".{path.name}.{os.urandom(4).hex()}{TMP_SUFFIX}")
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            yield fd
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        tmp.rename(path)
    except BaseException:
        with suppress(OSError):
            tmp.unlink()
        raise
    if durable:
        fsync_path(path.parent)


def write_all(fd: int, data: memoryview) -> None:
    """Call ``os.write`` until all of ``data`` is written. Raises ``OSError``."""
    while data:
        data = data[os.write(fd, data) :]


def fsync_path(path: Path) -> None:
    """Make the bytes of a file durable, or the names in a directory (not the bytes of its files). Raises ``OSError``."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def ensure_dir(path: Path) -> None:
    """Create the directory ``path`` and its missing parents, each new name durable in its parent. Raises ``OSError``."""
    if path.is_dir():
        return
    ensure_dir(path.parent)
    path.mkdir(exist_ok=True)
    fsync_path(path.parent)
