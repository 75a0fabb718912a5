"""Find the checkpoint that an attempt starts from: the newest intact one of its lineage. The newest checkpoint on the disk
could be that of a fenced attempt whose processes are still alive."""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from ratchet_contract.atomic_write import ensure_dir, fsync_path
from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Base, Segment, lineage_contains
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, checkpoint_dir_name
from ratchet_store.filesystem.durable_io import DAMAGED, MISSING, UNREADABLE, read_error, refresh
from ratchet_store.format.manifest_file import checkpoint_dirs, read_manifest
from ratchet_store.read.checkpoint_reader import verify_files


class Quarantine(NamedTuple):
    """A damaged checkpoint that was moved as a whole to ``path``. ``error``: what is damaged."""

    step: int
    attempt: int
    error: str
    path: Path


def find_base(
    checkpoints: Path,
    quarantine: Path | None,
    lineage: Sequence[Segment],
    *,
    expected_job_id: str | None = None,
    root: Base | None = None,
    check: Callable[[Path, Manifest], object] = verify_files,
) -> tuple[Manifest | None, list[Quarantine]]:
    """Return the manifest of the newest intact checkpoint of the lineage, and the damaged checkpoints that were moved away.
    The manifest is None if there is no intact checkpoint.

    Damaged checkpoints newer than the result are moved to ``quarantine``; if ``quarantine`` is None, the first damage is
    raised. Uncommitted checkpoints are skipped. ``expected_job_id``: a checkpoint of another job counts as damaged. ``root``:
    what the oldest segment of the lineage started from; None: any earlier step. ``check``: verifies a checkpoint's files.
    Raises ``CheckpointError`` for other errors.
    """
    moved: list[Quarantine] = []
    for step, attempt, directory in checkpoint_dirs(checkpoints):
        if not lineage_contains(lineage, step, attempt):
            continue
        try:
            manifest = read_valid_manifest(directory, lineage, expected_job_id, root)
            check(directory, manifest)
            return manifest, moved
        except CheckpointError as error:
            if error.code == MISSING:
                continue
            if error.code != DAMAGED:
                raise
            if not (directory / MANIFEST_NAME).exists():  # deleted while we read it
                continue
            if quarantine is None:
                raise
            moved.append(Quarantine(step, attempt, error.detail, move_to_quarantine(directory, quarantine)))
    return None, moved


def find_adoptable(
    checkpoints: Path,
    lineage: Sequence[Segment],
    known: Collection[tuple[int, int]],
    *,
    expected_job_id: str | None = None,
    root: Base | None = None,
) -> list[Manifest]:
    """Return the manifests of intact checkpoints in the lineage that are not in ``known``, oldest first. Damaged and uncommitted
    ones are skipped. Raises ``CheckpointError`` for other errors."""
    found: list[Manifest] = []
    for step, attempt, directory in checkpoint_dirs(checkpoints):
        if not lineage_contains(lineage, step, attempt) or (step, attempt) in known:
            continue
        try:
            manifest = read_valid_manifest(directory, lineage, expected_job_id, root)
            verify_files(directory, manifest)
            _sync_names(directory)  # the process that committed it may have died before
        except CheckpointError as error:
            if error.code not in (MISSING, DAMAGED):
                raise
            continue
        found.append(manifest)
    return found[::-1]


def _sync_names(directory: Path) -> None:
    """Sync the checkpoint's directory and its parent, so that the names in both are durable. Raises ``CheckpointError``."""
    try:
        fsync_path(directory)
        fsync_path(directory.parent)
    except OSError as error:
        raise read_error(directory, error) from error


def read_valid_manifest(directory: Path, lineage: Sequence[Segment], job_id: str | None, root: Base | None) -> Manifest:
    """Return the manifest of a checkpoint of the lineage, after checking its job (``job_id`` None: any) and its parent. Raises
    ``CheckpointError``."""
    refresh(directory)  # otherwise a manifest just committed by another node might appear to be missing
    manifest = read_manifest(directory)
    if job_id is not None and manifest.job_id != job_id:
        raise CheckpointError(f"{directory} belongs to job {manifest.job_id}, not to {job_id}")
    _check_parent(directory, manifest, lineage, root)
    return manifest


def _check_parent(directory: Path, manifest: Manifest, lineage: Sequence[Segment], root: Base | None) -> None:
    """Check that the parent in the manifest fits the lineage. Raises ``CheckpointError`` (``checkpoint-damaged``) if not."""
    parent = manifest.parent
    segment = next(s for s in lineage if s.contains(manifest.step, manifest.attempt))
    oldest = segment.after_step == min(s.after_step for s in lineage)
    if parent.attempt == manifest.attempt and lineage_contains(lineage, parent.step, manifest.attempt):
        fits = parent.step < manifest.step
    elif oldest:
        fits = parent.step < manifest.step if root is None else parent == root
    else:
        fits = (
            parent.step == segment.after_step
            and parent.attempt is not None
            and lineage_contains(lineage, parent.step, parent.attempt)
        )
    if not fits:
        raise CheckpointError(
            f"{directory} descends from step {parent.step} of attempt {parent.attempt}, which is not in this attempt's lineage"
        )
    if parent.attempt is not None and lineage_contains(lineage, parent.step, parent.attempt):
        _check_parent_digest(directory, directory.with_name(checkpoint_dir_name(parent.step, parent.attempt)), parent)


def _check_parent_digest(directory: Path, sibling: Path, parent: Base) -> None:
    """Raise ``CheckpointError`` if the parent's manifest in ``sibling`` has another digest than ``parent``. Without a manifest
    that is readable and valid, nothing is checked."""
    try:
        there = read_manifest(sibling)
    except CheckpointError:
        return  # it is gone, or its damage is found when it is checked itself
    if there.digest != parent.digest:
        raise CheckpointError(
            f"{directory} descends from {parent.digest}, but {sibling.name} has digest {there.digest}"
        )


def move_to_quarantine(directory: Path, quarantine: Path) -> Path:
    """Move a checkpoint's directory by one rename into ``quarantine``, and return its new path. Raises ``CheckpointError`` if
    that fails."""
    try:
        ensure_dir(quarantine)
        for number in range(1000):
            target = quarantine / (directory.name + (f".{number}" if number else ""))
            if target.exists():
                continue
            try:
                directory.rename(target)  # succeeds onto an empty directory, but never onto a non-empty one
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    continue
                raise
            fsync_path(quarantine)
            fsync_path(directory.parent)
            return target
    except OSError as error:
        raise CheckpointError(
            f"{directory} is damaged but cannot be moved to {quarantine}: {error.strerror}; move it away by hand",
            code=UNREADABLE,
        ) from error
    raise CheckpointError(f"{quarantine} holds 1000 copies of {directory.name}: empty it", code=UNREADABLE)
