"""The current directory of a job's ranks: a writable copy of the code snapshot, made once and kept over all attempts.

What a script writes relative to its current directory, its own checkpoints among it, is there for the next attempt. The code
itself is imported from the snapshot, which nobody can change.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from ratchet_worker import procs

_PREFIX: Final = ".work-"


def prepare(code: Path | None, work: Path) -> None:
    """Make ``work`` unless it is there: a copy of ``code``, or empty. Raises ``OSError``.

    Copied under another name beside it, synced and renamed, so a copy that a crash cut short is never used; the next call
    removes it. One process at a time (the agent, under its attempt's lock).
    """
    if work.is_dir():
        return
    for left in work.parent.glob(f"{_PREFIX}*"):
        procs.remove_tree(left)
    copy = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=work.parent))
    try:
        copy.chmod(0o755)
        if code is not None:
            _copy(code, copy)
        _sync(copy)
        copy.rename(work)
    except BaseException:
        procs.remove_tree(copy)
        raise
    _sync(work.parent)


def _copy(source: Path, target: Path) -> None:
    """Files and links below ``source``; whoever owns the copy may write all of it."""
    with os.scandir(source) as scan:
        for entry in scan:
            place = target / entry.name
            if entry.is_symlink():
                place.symlink_to(Path(entry.path).readlink())
            elif entry.is_dir():
                place.mkdir()
                place.chmod(0o755)
                _copy(Path(entry.path), place)
                _sync(place)
            else:
                shutil.copyfile(entry.path, place)
                place.chmod(stat.S_IMODE(entry.stat().st_mode) | stat.S_IRUSR | stat.S_IWUSR)
                _sync(place)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
