"""Delete checkpoints: the manifest first, by a durable rename, so that a crash never leaves one that looks whole.

Pinning creates the marker file, then checks for the manifest. ``delete_unless_pinned`` removes the manifest, then checks for the
marker file, and restores the manifest if it is there. So ``delete_unless_pinned`` keeps a checkpoint whose pin found a manifest.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from ratchet_contract.atomic_write import TMP_SUFFIX, fsync_path
from ratchet_contract.checkpoint.manifest import open_manifest
from ratchet_contract.checkpoint.resume_report import Segment, lineage_contains
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import DELETED_MANIFEST_NAME, MANIFEST_NAME, PINNED_NAME, JobPaths
from ratchet_store.filesystem.durable_io import UNREADABLE, open_regular, remove_tree
from ratchet_store.format.manifest_file import MAX_MANIFEST_BYTES, check_files, checkpoint_dirs, read_manifest
from ratchet_store.format.safetensors_header import refuse_json_bomb
from ratchet_store.retention.rules import Id


def complete_checkpoints(checkpoints: Path, lineage: Sequence[Segment]) -> dict[Id, bool]:
    """Return the checkpoints of the ``lineage`` that look complete by manifest and file sizes, newest first; the value is True if
    pinned."""
    found = [
        (s, e, d) for s, e, d in checkpoint_dirs(checkpoints) if lineage_contains(lineage, s, e) and _looks_complete(d)
    ]
    return {(step, attempt): _is_pinned(directory) for step, attempt, directory in found}


def delete_unless_pinned(directory: Path) -> bool:
    """Delete one checkpoint and return True, also if it is missing; False if it is pinned. Raises ``CheckpointError`` when the
    system refuses."""
    try:
        if _is_pinned(directory):
            return False
        if _uncommit(directory) and _is_pinned(directory):
            _restore_manifest(directory)
            return False
        _remove_checkpoint(directory)
    except OSError as error:
        raise _delete_error(directory, error) from error
    return True


def delete(directory: Path) -> None:
    """Delete one checkpoint, pinned or not; a missing one is not an error. Raises ``CheckpointError`` when the system refuses."""
    try:
        _uncommit(directory)
        _remove_checkpoint(directory)
    except OSError as error:
        raise _delete_error(directory, error) from error


def _uncommit(directory: Path) -> bool:
    """Rename the manifest to ``DELETED_MANIFEST_NAME``, durably, so that the checkpoint no longer counts. False if nothing was
    renamed."""
    if directory.is_symlink():
        return False
    try:
        (directory / MANIFEST_NAME).rename(directory / DELETED_MANIFEST_NAME)
    except (FileNotFoundError, NotADirectoryError):
        renamed = False
    else:
        renamed = True
    with suppress(FileNotFoundError, NotADirectoryError):  # the whole directory is gone: another process has deleted it
        fsync_path(directory)
    return renamed


def _restore_manifest(directory: Path) -> None:
    """Undo ``_uncommit``, durably: the checkpoint counts again. Only for a checkpoint from which nothing else was removed.
    Raises ``OSError``."""
    (directory / DELETED_MANIFEST_NAME).rename(directory / MANIFEST_NAME)
    fsync_path(directory)


def sweep(checkpoints: Path, *, dead_attempts: Collection[int]) -> list[str]:
    """Finish interrupted deletions, and delete uncommitted checkpoints and temporary files of ``dead_attempts``. A pinned
    checkpoint whose deletion was interrupted is restored instead if it has all of its files. Return the removed paths,
    relative to ``checkpoints``. Raises ``CheckpointError`` or ``OSError``."""
    removed: list[str] = []
    for _, attempt, directory in checkpoint_dirs(checkpoints):
        try:
            if directory.is_symlink():
                continue
            names = {entry.name for entry in directory.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _delete_error(directory, error) from error
        if MANIFEST_NAME not in names and {DELETED_MANIFEST_NAME, PINNED_NAME} <= names and _is_restorable(directory):
            _restore_manifest(directory)
        elif MANIFEST_NAME not in names and (DELETED_MANIFEST_NAME in names or attempt in dead_attempts):
            delete(directory)
            removed.append(directory.name)
        elif attempt in dead_attempts:
            for name in sorted(name for name in names if name.endswith(TMP_SUFFIX)):
                (directory / name).unlink(missing_ok=True)
                removed.append(f"{directory.name}/{name}")
    return removed


def delete_all(job: JobPaths) -> list[tuple[int, int]]:
    """Delete all checkpoints of a job, pinned and quarantined ones too; no attempt may run. Returns ``(step, attempt)`` of those
    not in quarantine, oldest first. Raises ``CheckpointError``."""
    found = list(checkpoint_dirs(job.checkpoints))
    for _, _, directory in reversed(found):
        delete(directory)
    for directory in (job.checkpoints, job.quarantine):
        try:
            _remove_checkpoint(directory)
        except OSError as error:
            raise _delete_error(directory, error) from error
    return [(step, attempt) for step, attempt, _ in reversed(found)]


def _is_pinned(directory: Path) -> bool:
    """True if the checkpoint's directory has the marker file ``PINNED``. False for a link."""
    return not directory.is_symlink() and os.path.lexists(directory / PINNED_NAME)


def _is_restorable(directory: Path) -> bool:
    """True if the removed manifest can be read and all files that it lists exist with their sizes."""
    try:
        with os.fdopen(open_regular(directory / DELETED_MANIFEST_NAME), "rb") as file:
            if os.fstat(file.fileno()).st_size > MAX_MANIFEST_BYTES:
                return False
            raw = file.read(MAX_MANIFEST_BYTES)
        refuse_json_bomb(raw)
        check_files(directory, open_manifest(raw))
    except (CheckpointError, OSError):
        return False
    return True


def _looks_complete(directory: Path) -> bool:
    """True if the checkpoint is not a link, its manifest is valid and its rank files exist with their sizes."""
    try:
        check_files(directory, read_manifest(directory))
        return not directory.is_symlink()
    except CheckpointError:
        return False


def _remove_checkpoint(directory: Path) -> None:
    """Remove a directory with its content, a file or a link. Links are not followed, and a missing path is not an error."""
    try:
        if not stat.S_ISDIR(os.lstat(directory).st_mode):
            directory.unlink(missing_ok=True)
            return
    except (FileNotFoundError, NotADirectoryError):
        return
    # nothing is synced: files that come back after a power loss belong to no committed checkpoint
    for last in (False, True):
        try:
            with os.scandir(directory) as found:
                entries = sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in found)
        except FileNotFoundError:
            return
        for name, is_dir in entries:
            # the last one: by it ``sweep`` knows that the rest may be removed
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
        except OSError as error:  # a marker file was created meanwhile: too late, as its creator will notice
            if last or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return


def _delete_error(directory: Path, error: OSError) -> CheckpointError:
    """Return the error for a deletion that the system has refused."""
    return CheckpointError(
        f"{directory} was not deleted completely: {error.strerror or error}; check owner and mode", code=UNREADABLE
    )
