"""Find the checkpoint that an attempt starts from, and those that the service may adopt; move damaged ones to quarantine.

"The newest valid manifest" would be wrong: it could be a zombie's, or of the branch abandoned by a resume from an earlier step.
Only checkpoints in the attempt's lineage count. A manifest's parent must be in it, too, or be what the lineage started from.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from ratchet_contract.checkpoint.manifest import Manifest
from ratchet_contract.checkpoint.resume_report import Base, Segment, lineage_contains
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import MANIFEST_NAME, checkpoint_dir_name
from ratchet_store.filesystem.durable_io import DAMAGED, MISSING, UNREADABLE, ensure_dir, fsync_dir, read_error, refresh
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
    None: there is no intact one, so the attempt starts from scratch (or from the fork's source).

    ``checkpoints``: the job's checkpoint directory. Damaged checkpoints newer than the result are moved to ``quarantine``; with
    ``quarantine`` None the first one's error is raised instead. A checkpoint of another job than ``expected_job_id`` (None: any
    job) counts as damaged, and so does one whose parent does not fit the lineage. Directories without a manifest or outside the
    lineage are skipped. ``check`` verifies a checkpoint; the default reads every byte. A caller that reads and verifies the
    checkpoint afterwards passes ``check_files``, which checks only the sizes; if that caller then finds damage, it calls
    ``move_to_quarantine`` and this function again. ``root`` is what the oldest segment started from (``Base()`` for scratch, or
    a fork's base); None: any parent of an earlier step is accepted there.

    Raises ``CheckpointError`` where an older checkpoint must not silently replace the newest: another format version
    (``checkpoint-format``), files that the system cannot read or a quarantine that fails (``checkpoint-unreadable``).
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
    """Return the manifests of intact checkpoints in the lineage that are not among ``known`` ``(step, attempt)``, oldest first.
    The service does not know them because the report of their commit was lost.

    Every byte of them is verified. Their names are synced, since the process that committed one may have died before it synced
    the name. Damaged ones are skipped; ``find_base`` handles them. ``root``, ``expected_job_id``: as in ``find_base``. Raises
    ``CheckpointError`` for another format version or files that cannot be read.
    """
    found: list[Manifest] = []
    for step, attempt, directory in checkpoint_dirs(checkpoints):
        if not lineage_contains(lineage, step, attempt) or (step, attempt) in known:
            continue
        try:
            manifest = read_valid_manifest(directory, lineage, expected_job_id, root)
            verify_files(directory, manifest)
            _sync_names(directory)
        except CheckpointError as error:
            if error.code not in (MISSING, DAMAGED):
                raise
            continue
        found.append(manifest)
    return found[::-1]


def _sync_names(directory: Path) -> None:
    """Sync the checkpoint's directory and its parent, so that their names are durable. Raises ``CheckpointError``."""
    try:
        fsync_dir(directory)
        fsync_dir(directory.parent)
    except OSError as error:
        raise read_error(directory, error) from error


def read_valid_manifest(directory: Path, lineage: Sequence[Segment], job_id: str | None, root: Base | None) -> Manifest:
    """Return the checkpoint's manifest after checking that it is of job ``job_id`` (None: any) and that its parent fits the
    lineage (``_check_parent``). Raises ``CheckpointError``."""
    refresh(directory)  # otherwise a manifest just committed by another node might appear to be missing
    manifest = read_manifest(directory)
    if job_id is not None and manifest.job_id != job_id:
        raise CheckpointError(f"{directory} belongs to job {manifest.job_id}, not to {job_id}")
    _check_parent(directory, manifest, lineage, root)
    return manifest


def _check_parent(directory: Path, manifest: Manifest, lineage: Sequence[Segment], root: Base | None) -> None:
    """Check the parent that the manifest records. It must be an earlier checkpoint of the same attempt, or the checkpoint that
    the manifest's segment of the lineage started from. For the oldest segment that is ``root``; if ``root`` is None, any parent
    of an earlier step is accepted there. If the parent is in the lineage and its manifest can still be read, it must have the
    recorded digest. Raises ``CheckpointError`` (``checkpoint-damaged``) if not."""
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
    """Check that the manifest in ``sibling``, the parent's directory, has the digest ``parent.digest``, which the checkpoint in
    ``directory`` recorded. Nothing is checked if ``sibling`` has no valid manifest: retention may have deleted it. Raises
    ``CheckpointError`` (``checkpoint-damaged``) if the digests differ. ``directory``: named in the message."""
    try:
        there = read_manifest(sibling)
    except CheckpointError:
        return  # it is gone, or its damage is found when it is checked itself
    if there.digest != parent.digest:
        raise CheckpointError(
            f"{directory} descends from {parent.digest}, but {sibling.name} has digest {there.digest}"
        )


def move_to_quarantine(directory: Path, quarantine: Path) -> Path:
    """Move a damaged checkpoint as a whole into the directory ``quarantine``, by one rename, and return its new path. If its
    name is taken there, a number is appended. Raises ``CheckpointError`` (``checkpoint-unreadable``) when the system refuses."""
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
            fsync_dir(quarantine)
            fsync_dir(directory.parent)
            return target
    except OSError as error:
        raise CheckpointError(
            f"{directory} is damaged but cannot be moved to {quarantine}: {error.strerror}; move it away by hand",
            code=UNREADABLE,
        ) from error
    raise CheckpointError(f"{quarantine} holds 1000 copies of {directory.name}: empty it", code=UNREADABLE)
