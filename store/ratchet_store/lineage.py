"""Which checkpoint an attempt starts from, and which ones the service may adopt.

"The newest valid manifest" would be wrong: it takes a zombie's, and the abandoned branch after a resume from an earlier step.
Only what the attempt's lineage holds counts, and a manifest's parent must lie in it too.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from ratchet_contract.errors import CheckpointError
from ratchet_contract.manifest import Manifest
from ratchet_contract.paths import MANIFEST_NAME, checkpoint_dir_name
from ratchet_contract.resume import Base, Segment, holds
from ratchet_store.commit import checkpoint_dirs, read_manifest
from ratchet_store.files import DAMAGED, MISSING, UNREADABLE, ensure_dir, fsync_dir, not_read, refresh
from ratchet_store.read import verify_files


class Quarantine(NamedTuple):
    """A damaged checkpoint that was moved out of the way whole."""

    step: int
    epoch: int
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
    """The newest checkpoint that the lineage holds and whose every byte is right; None: start from scratch (or the fork).
    ``check``: how that is found out. Whoever reads and verifies it afterwards lets ``check_files`` look at the sizes alone, and
    calls ``set_aside`` and this function again where that finds damage.

    Damaged ones on the way are moved to ``quarantine`` and reported (None: raised), those without a manifest or outside the
    lineage passed over.
    ``root`` is what the oldest segment started from (``Base()`` for scratch, or a fork's base); None accepts any parent there.
    Raises ``CheckpointError`` where an older one must not silently take its place: another format version
    (``checkpoint-format``), files that the system does not give out or a quarantine that fails (``checkpoint-unreadable``).
    """
    moved: list[Quarantine] = []
    for step, epoch, directory in checkpoint_dirs(checkpoints):
        if not holds(lineage, step, epoch):
            continue
        try:
            manifest = _valid(directory, lineage, expected_job_id, root)
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
            moved.append(Quarantine(step, epoch, error.detail, set_aside(directory, quarantine)))
    return None, moved


def adoptable(
    checkpoints: Path,
    lineage: Sequence[Segment],
    known: Collection[tuple[int, int]],
    *,
    expected_job_id: str | None = None,
    root: Base | None = None,
) -> list[Manifest]:
    """Valid, fully verified checkpoints on disk that the lineage holds and that are not among ``known`` ``(step, epoch)``:
    their report was lost. Oldest first, and durable: what had committed one may have died before it had synced the names.
    Damaged ones are left to ``find_base``. Raises as ``find_base`` does."""
    found: list[Manifest] = []
    for step, epoch, directory in checkpoint_dirs(checkpoints):
        if not holds(lineage, step, epoch) or (step, epoch) in known:
            continue
        try:
            manifest = _valid(directory, lineage, expected_job_id, root)
            verify_files(directory, manifest)
            _sync(directory)
        except CheckpointError as error:
            if error.code not in (MISSING, DAMAGED):
                raise
            continue
        found.append(manifest)
    return found[::-1]


def _sync(directory: Path) -> None:
    try:
        fsync_dir(directory)
        fsync_dir(directory.parent)
    except OSError as error:
        raise not_read(directory, error) from error


def _valid(directory: Path, lineage: Sequence[Segment], job_id: str | None, root: Base | None) -> Manifest:
    refresh(directory)  # else a manifest that another node has just committed might be believed not to be there
    manifest = read_manifest(directory)
    if job_id is not None and manifest.job_id != job_id:
        raise CheckpointError(f"{directory} belongs to job {manifest.job_id}, not to {job_id}")
    _check_parent(directory, manifest, lineage, root)
    return manifest


def _check_parent(directory: Path, manifest: Manifest, lineage: Sequence[Segment], root: Base | None) -> None:
    """The parent is an earlier checkpoint of the same attempt, or what its segment of the lineage started from."""
    parent = manifest.parent
    segment = next(s for s in lineage if s.holds(manifest.step, manifest.epoch))
    oldest = segment.after_step == min(s.after_step for s in lineage)
    if parent.epoch == manifest.epoch and holds(lineage, parent.step, manifest.epoch):
        fits = parent.step < manifest.step
    elif oldest:
        fits = parent.step < manifest.step if root is None else parent == root
    else:
        fits = (
            parent.step == segment.after_step and parent.epoch is not None and holds(lineage, parent.step, parent.epoch)
        )
    if not fits:
        raise CheckpointError(
            f"{directory} descends from step {parent.step} of attempt {parent.epoch}, which is not in this attempt's lineage"
        )
    if parent.epoch is not None and holds(lineage, parent.step, parent.epoch):
        _check_parent_digest(directory, directory.with_name(checkpoint_dir_name(parent.step, parent.epoch)), parent)


def _check_parent_digest(directory: Path, sibling: Path, parent: Base) -> None:
    """Where the parent is still on disk, it must be the very one; retention may have deleted it."""
    try:
        there = read_manifest(sibling)
    except CheckpointError:
        return  # not there any more, or its own fault is found when its turn comes
    if there.digest != parent.digest:
        raise CheckpointError(
            f"{directory} descends from {parent.digest}, but {sibling.name} has digest {there.digest}"
        )


def set_aside(directory: Path, quarantine: Path) -> Path:
    """Move a damaged checkpoint whole to ``quarantine``, by one rename, to a name that is not taken; returns it. Raises
    ``CheckpointError`` (``checkpoint-unreadable``) when the system refuses."""
    try:
        ensure_dir(quarantine)
        for number in range(1000):
            target = quarantine / (directory.name + (f".{number}" if number else ""))
            if target.exists():
                continue
            try:
                directory.rename(target)  # onto an empty directory it would succeed, onto a full one never
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
