"""Deleting checkpoints. The manifest goes first, by a durable rename, so that a crash never leaves one that looks whole.

Only the fenced service, or a worker within its own epoch, may call these. A pin may come at any time: who pins makes the mark,
durably, and then looks for the manifest; who deletes takes the manifest away, durably, and then looks for the mark. One of
the two notices the other, so a pin that found a manifest holds, and one that comes too late is told so. A manifest that
was taken away from beside a mark goes back; where a crash came between, ``sweep`` puts it back.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import open_manifest
from ratchet_contract.paths import DELETED_MANIFEST_NAME, MANIFEST_NAME, PINNED_NAME, JobPaths
from ratchet_contract.resume import Segment, holds
from ratchet_store.commit import MAX_MANIFEST, check_files, checkpoint_dirs, read_manifest
from ratchet_store.files import TMP_SUFFIX, UNREADABLE, fsync_dir, open_regular, remove_tree
from ratchet_store.header import refuse_json_bomb
from ratchet_store.keeping import Id


def whole(checkpoints: Path, lineage: Sequence[Segment]) -> dict[Id, bool]:
    """Checkpoints of the ``lineage`` that look whole, the newest first, and whether they have the mark ``PINNED``: what
    ``keeping`` decides over when no attempt is alive. One that is deletes for itself, by a ``Keeper``. What does not look whole
    is neither kept nor deleted by a rule: ``find_base`` deals with it."""
    found = [(s, e, d) for s, e, d in checkpoint_dirs(checkpoints) if holds(lineage, s, e) and _looks_whole(d)]
    return {(step, epoch): _is_pinned(directory) for step, epoch, directory in found}


def delete_unless_pinned(directory: Path) -> bool:
    """Delete one checkpoint, unless its directory has the mark ``PINNED``, or gets it before its manifest is gone: False then,
    and it is whole as before. Raises as ``delete`` does."""
    if _is_pinned(directory):
        return False
    try:
        if _uncommit(directory) and _is_pinned(directory):
            _commit_again(directory)
            return False
        _remove_checkpoint(directory)
    except OSError as error:
        raise _not_deleted(directory, error) from error
    return True


def delete(directory: Path) -> None:
    """Delete one checkpoint: first its manifest stops counting, durably, then its files go. A missing one is fine.

    Raises ``CheckpointError`` (``checkpoint-unreadable``) when the system refuses; ``sweep`` finishes what was begun.
    """
    try:
        _uncommit(directory)
        _remove_checkpoint(directory)
    except OSError as error:
        raise _not_deleted(directory, error) from error


def _uncommit(directory: Path) -> bool:
    """Take the manifest away, durably. False: it was gone already, and some of the files may be."""
    try:
        (directory / MANIFEST_NAME).rename(directory / DELETED_MANIFEST_NAME)
    except FileNotFoundError:
        renamed = False
    else:
        renamed = True
    with suppress(FileNotFoundError):  # the whole directory is gone: another deleter has come to its end
        fsync_dir(directory)
    return renamed


def _commit_again(directory: Path) -> None:
    """Put back the manifest of a checkpoint of which nothing else was removed."""
    (directory / DELETED_MANIFEST_NAME).rename(directory / MANIFEST_NAME)
    fsync_dir(directory)


def sweep(checkpoints: Path, *, dead_epochs: Collection[int]) -> list[str]:
    """Remove what counts as nothing: half-deleted checkpoints, and of attempts that are proved dead also directories without
    a manifest and ``.tmp`` files. What was pinned before its deletion had removed a file is committed again. Returns the
    removed paths, relative to ``checkpoints``. Raises as ``delete`` does."""
    removed: list[str] = []
    for _, epoch, directory in checkpoint_dirs(checkpoints):
        try:
            names = {entry.name for entry in directory.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _not_deleted(directory, error) from error
        if (
            MANIFEST_NAME not in names
            and {DELETED_MANIFEST_NAME, PINNED_NAME} <= names
            and _only_uncommitted(directory)
        ):
            _commit_again(directory)
        elif MANIFEST_NAME not in names and (DELETED_MANIFEST_NAME in names or epoch in dead_epochs):
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
            _remove_checkpoint(directory)
        except OSError as error:
            raise _not_deleted(directory, error) from error
    return [(step, epoch) for step, epoch, _ in reversed(found)]


def _is_pinned(directory: Path) -> bool:
    return os.path.lexists(directory / PINNED_NAME)


def _only_uncommitted(directory: Path) -> bool:
    """Is everything there that the manifest speaks of, which was taken away?"""
    try:
        with os.fdopen(open_regular(directory / DELETED_MANIFEST_NAME), "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_MANIFEST:
                return False
            raw = file.read(MAX_MANIFEST)
        refuse_json_bomb(raw)
        check_files(directory, open_manifest(raw))
    except (CheckpointError, OSError):
        return False
    return True


def _looks_whole(directory: Path) -> bool:
    try:
        check_files(directory, read_manifest(directory))
    except CheckpointError:
        return False
    return True


def _remove_checkpoint(directory: Path) -> None:
    """Remove a directory and what is in it, links not followed; what another process removes meanwhile is fine. The uncommitted
    manifest goes last of the files: it is what tells ``sweep`` that the rest may go. Nothing is synced: what comes back after
    a power loss is not committed."""
    try:
        if not stat.S_ISDIR(os.lstat(directory).st_mode):
            return
    except (FileNotFoundError, NotADirectoryError):
        return
    for last in (False, True):
        try:
            with os.scandir(directory) as found:
                entries = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in found)
        except FileNotFoundError:
            return
        for name, is_dir in entries:
            if name == DELETED_MANIFEST_NAME:
                continue
            if is_dir:
                remove_tree(directory / name)
            else:
                (directory / name).unlink(missing_ok=True)
        (directory / DELETED_MANIFEST_NAME).unlink(missing_ok=True)
        try:
            directory.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:  # a mark came meanwhile: too late, as who made it will notice
            if last or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return


def _not_deleted(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{directory} was not deleted completely: {error.strerror or error}; check owner and mode", code=UNREADABLE
    )
