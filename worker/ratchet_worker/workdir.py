"""The current directory of a job's ranks: a writable copy of the code snapshot, made once and kept over all attempts.

What a script writes relative to its current directory, its own checkpoints among it, is there for the next attempt. The code
itself is imported from the snapshot, which nobody can change.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from ratchet_contract import code_tree
from ratchet_worker import procs

_PREFIX: Final = ".work-"


def prepare(code: Path | None, work: Path) -> None:
    """Make ``work`` unless it is there: a copy of ``code``, or empty. Raises ``OSError``.

    Copied under another name beside it, synced and renamed, so a copy that a crash cut short is never used; the next call
    removes it. One process at a time on each disk: node 0's agent before the others go on, each under its attempt's lock.
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
    except BaseException as error:
        procs.remove_tree(copy)
        if isinstance(error, OSError) and work.is_dir():  # another node's agent was quicker
            return
        raise
    _sync(work.parent)


def _copy(source: Path, target: Path) -> None:
    """What a snapshot of ``source`` holds; whoever owns the copy may write all of it."""
    folders = {target}
    for entry in code_tree.entries(source, code_tree.UNLIMITED):
        place = target / entry.path
        place.parent.mkdir(parents=True, exist_ok=True)
        folders.update(p for p in place.parents if p.is_relative_to(target))
        if entry.link is not None:
            place.symlink_to(entry.link)
        else:
            shutil.copyfile(entry.source, place)
            place.chmod(0o755 if entry.executable else 0o644)
            _sync(place)
    for folder in folders:
        folder.chmod(0o755)
        _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
