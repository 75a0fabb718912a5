"""Deleting checkpoints. The manifest goes first, by a durable rename, so that a crash never leaves one that looks whole.

Only the fenced service, or a worker within its own epoch, may call these.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import DELETED_MANIFEST_NAME, MANIFEST_NAME, PINNED_NAME, JobPaths
from ratchet_contract.resume import Segment, holds
from ratchet_store.commit import check_files, checkpoint_dirs, read_manifest
from ratchet_store.files import TMP_SUFFIX, UNREADABLE, fsync_dir

MIN_KEEP: Final = 2


def retain(
    checkpoints: Path,
    *,
    keep_last: int,
    lineage: Sequence[Segment],
    epoch: int | None = None,
    pinned: Collection[tuple[int, int]] = (),
    protected: Collection[tuple[int, int]] = (),
) -> list[tuple[int, int]]:
    """Delete the oldest checkpoints of ``lineage`` beyond ``keep_last`` (at least two); returns the deleted ``(step, epoch)``.

    Never deleted, and not counted among the kept: ``pinned``, by name or by the file ``PINNED`` in their directory.
    Never deleted: ``protected`` (the caller names its base and the newest verified one), what lies outside the lineage, and what
    does not look whole, which does not count as kept either (``find_base`` deals with it).
    ``epoch``: a worker names its own attempt. Then only that attempt's checkpoints are deleted, and none at all when a
    later attempt has left anything on disk: the caller is a zombie, and may be deleting what the later one started from.
    Raises ``CheckpointError`` (``checkpoint-unreadable``) when the system refuses.
    """
    found = list(checkpoint_dirs(checkpoints))
    if epoch is not None and any(other > epoch for _, other, _ in found):
        return []
    free = [(s, e, d) for s, e, d in found if holds(lineage, s, e) and (s, e) not in pinned and not _is_pinned(d)]
    whole = [(s, e, d) for s, e, d in free if _looks_whole(d)]
    surplus = [
        (step, number, directory)
        for step, number, directory in whole[max(keep_last, MIN_KEEP) :]
        if (step, number) not in protected and (epoch is None or number == epoch)
    ]
    deleted: list[tuple[int, int]] = []
    for step, number, directory in reversed(surplus):
        if not _is_pinned(directory):  # asked again: the service may pin at any time
            delete(directory)
            deleted.append((step, number))
    return deleted


def delete(directory: Path) -> None:
    """Delete one checkpoint: first its manifest stops counting, durably, then its files go. A missing one is fine.

    Raises ``CheckpointError`` (``checkpoint-unreadable``) when the system refuses; ``sweep`` finishes what was begun.
    """
    try:
        with suppress(FileNotFoundError):
            (directory / MANIFEST_NAME).rename(directory / DELETED_MANIFEST_NAME)
        if directory.is_dir():
            fsync_dir(directory)
        _remove_tree(directory)
    except OSError as error:
        raise _not_deleted(directory, error) from error


def sweep(checkpoints: Path, *, dead_epochs: Collection[int]) -> list[str]:
    """Remove what counts as nothing: half-deleted checkpoints, and of attempts that are proved dead also directories without
    a manifest and ``.tmp`` files. Returns the removed paths, relative to ``checkpoints``. Raises as ``delete`` does."""
    removed: list[str] = []
    for _, epoch, directory in checkpoint_dirs(checkpoints):
        try:
            names = {entry.name for entry in directory.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _not_deleted(directory, error) from error
        if MANIFEST_NAME not in names and (DELETED_MANIFEST_NAME in names or epoch in dead_epochs):
            delete(directory)
            removed.append(directory.name)
        elif epoch in dead_epochs:
            for name in sorted(name for name in names if name.endswith(TMP_SUFFIX)):
                (directory / name).unlink(missing_ok=True)
                removed.append(f"{directory.name}/{name}")
    return removed


def delete_all(job: JobPaths) -> list[tuple[int, int]]:
    """Delete every checkpoint of a job, and its quarantine; returns the ``(step, epoch)`` that were there. The job must not run.

    Raises ``CheckpointError`` (``checkpoint-unreadable``) when the system refuses.
    """
    found = list(checkpoint_dirs(job.checkpoints))
    for _, _, directory in reversed(found):
        delete(directory)
    for directory in (job.checkpoints, job.quarantine):
        try:
            _remove_tree(directory)
        except OSError as error:
            raise _not_deleted(directory, error) from error
    return [(step, epoch) for step, epoch, _ in reversed(found)]


def _is_pinned(directory: Path) -> bool:
    return os.path.lexists(directory / PINNED_NAME)


def _looks_whole(directory: Path) -> bool:
    try:
        check_files(directory, read_manifest(directory))
    except CheckpointError:
        return False
    return True


def _remove_tree(directory: Path) -> None:
    """Remove a directory and what is in it, links not followed; what another process removes meanwhile is fine. The uncommitted
    manifest goes last of the files: it is what tells ``sweep`` that the rest may go."""
    if not directory.is_dir() or directory.is_symlink():
        return
    for entry in sorted(directory.iterdir()):
        if entry.name == DELETED_MANIFEST_NAME:
            continue
        if entry.is_dir() and not entry.is_symlink():
            _remove_tree(entry)
        else:
            entry.unlink(missing_ok=True)
    (directory / DELETED_MANIFEST_NAME).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        directory.rmdir()
        fsync_dir(directory.parent)


def _not_deleted(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{directory} was not deleted completely: {error.strerror or error}; check owner and mode", code=UNREADABLE
    )
