"""Commits a checkpoint by one rename of its sealed manifest, reads manifests back with checks, and creates marker files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from ratchet_contract.atomic_write import fsync_path, write_atomic
from ratchet_contract.checkpoint.manifest import Manifest, Sealer, open_manifest
from ratchet_contract.errors import CheckpointError
from ratchet_contract.paths import (
    CHANGED_NAME,
    DELETED_MANIFEST_NAME,
    FINISHED_NAME,
    MANIFEST_NAME,
    parse_checkpoint_dir_name,
)
from ratchet_store.filesystem.durable_io import (
    DAMAGED,
    EXISTS,
    MISSING,
    NOT_WRITTEN,
    open_regular,
    read_error,
    refresh,
    write_error,
)
from ratchet_store.format.manifest_structure import StructureCheck, check_structure
from ratchet_store.format.safetensors_header import refuse_json_bomb

MAX_MANIFEST_BYTES: Final = 256 << 20  # bytes; about a million tensors
MAX_MARKER_BYTES: Final = 4096  # bytes of the text in a marker file


class ManifestWriter:
    """Commits checkpoints one after another. If the list of tensors equals the last valid one, it is only checked against the
    files' sizes."""

    def __init__(self) -> None:
        self._structure, self._sealer = StructureCheck(), Sealer()
        self._durable: set[Path] = set()  # job directories in which the name ``checkpoints`` is durable

    def commit(self, directory: Path, manifest: Manifest) -> Manifest:
        """Commit the checkpoint in ``directory``, whose rank files exist, by writing its manifest durably. Return the manifest
        with its digest. Committing the same manifest again is not an error.

        Raise ``CheckpointError``, for example with the code ``checkpoint-damaged`` or ``checkpoint-unreadable``. The code is
        ``checkpoint-exists`` if another manifest is committed there or the checkpoint is being deleted. After
        ``checkpoint-not-written`` the step may be saved once more.
        """
        _check_name(directory, manifest)
        self._structure.check(manifest)
        sealed, raw = self._sealer.seal(manifest)
        path = directory / MANIFEST_NAME
        check_files(directory, sealed)
        new = False
        try:
            if (directory / DELETED_MANIFEST_NAME).exists():
                raise CheckpointError(
                    f"{directory} is being deleted: save the step again under a new attempt", code=EXISTS
                )
            new = not _is_committed(directory, sealed)
            if new:
                write_atomic(path, raw, durable=True)
            else:  # the process that wrote it may have been killed before the sync
                fsync_path(directory)
            checkpoints, job = directory.parents[:2]
            fsync_path(checkpoints)
            if job not in self._durable:  # another process may have created it without a sync
                fsync_path(job)
                self._durable.add(job)
        except OSError as error:
            raise (_retract_manifest(path, error) if new else write_error(path, error)) from error
        return sealed


def mark_finished(directory: Path) -> None:
    """Create the marker file ``FINISHED`` durably: the committed checkpoint in ``directory`` is its job's last. Raise
    ``CheckpointError``."""
    path = directory / FINISHED_NAME
    try:
        # the manifest is not changed, since digests refer to it
        path.touch()
        fsync_path(directory)
    except OSError as error:
        raise write_error(path, error) from error


def mark_changed(directory: Path, description: str) -> bool:
    """Create the marker file ``CHANGED`` durably, and return True; return False if it exists already. The marker means that
    state changed after the commit, so that a resume is not exact. ``description``: the text of the file. Raise
    ``CheckpointError``."""
    path = directory / CHANGED_NAME
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        return False
    except OSError as error:
        raise write_error(path, error) from error
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(description.encode())
            file.flush()
            os.fsync(fd)
        fsync_path(directory)
    except OSError as error:
        raise write_error(path, error) from error
    return True


def read_changed_marker(directory: Path) -> str | None:
    """Return the text of the marker file ``CHANGED``, a general one if it is empty; None: there is no marker file. Raise
    ``CheckpointError`` if it cannot be read."""
    path = directory / CHANGED_NAME
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            text = file.read(MAX_MARKER_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise read_error(path, error) from error
    return text or "state changed after checkpoint() in the same loop body"  # a crash came before the text was written


def read_manifest(directory: Path) -> Manifest:
    """Return the checked manifest of a committed checkpoint; rank files are not read. Raise ``CheckpointError``:
    ``checkpoint-missing`` (not committed), ``checkpoint-damaged``, ``checkpoint-format``, ``checkpoint-unreadable``."""
    path = directory / MANIFEST_NAME
    try:
        fd = open_regular(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} holds no committed checkpoint: there is no {MANIFEST_NAME}", code=MISSING
        ) from None
    except OSError as error:
        raise read_error(path, error) from error
    with os.fdopen(fd, "rb") as file:
        try:
            if os.fstat(file.fileno()).st_size > MAX_MANIFEST_BYTES:
                raise CheckpointError(f"{path} is larger than {MAX_MANIFEST_BYTES} bytes")
            raw = file.read(MAX_MANIFEST_BYTES)
        except OSError as error:
            raise read_error(path, error) from error
    try:
        refuse_json_bomb(raw)
        manifest = open_manifest(raw)
        _check_name(directory, manifest)
        check_structure(manifest)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error.detail}", code=error.code) from None
    # made after the commit; the digest stays that of the manifest file
    if not manifest.finished and os.path.lexists(directory / FINISHED_NAME):
        return manifest.model_copy(update={"finished": True})
    return manifest


def check_files(directory: Path, manifest: Manifest) -> None:
    """Check that every rank file of the manifest exists with its size; the bytes are not read. Raise ``CheckpointError``."""
    for entry in manifest.files:
        path = f"{directory}/{entry.name}"
        try:
            size = os.lstat(path).st_size
        except OSError as error:
            raise read_error(Path(path), error) from error
        if size != entry.size:
            raise CheckpointError(f"{path} has {size} bytes, the manifest says {entry.size}", code=DAMAGED)


def checkpoint_dirs(checkpoints: Path) -> Iterator[tuple[int, int, Path]]:
    """Yield ``(step, attempt, path)`` for each entry of ``checkpoints`` that is named like a checkpoint, committed or not. The
    newest is first: the highest step and, of equal steps, the highest attempt. Yield nothing if ``checkpoints`` does not exist.
    Raise ``CheckpointError``."""
    refresh(checkpoints)
    try:
        found = [(parse_checkpoint_dir_name(path.name), path) for path in checkpoints.iterdir()]
    except FileNotFoundError:
        return
    except OSError as error:
        raise read_error(checkpoints, error) from error
    ids = [(parsed[0], parsed[1], path) for parsed, path in found if parsed is not None]
    yield from sorted(ids, reverse=True)


def _check_name(directory: Path, manifest: Manifest) -> None:
    """Check that the directory has the name of the manifest's checkpoint. Raises ``CheckpointError`` (``checkpoint-damaged``)."""
    if directory.name != manifest.id:
        raise CheckpointError(f"the manifest is of checkpoint {manifest.id}, the directory is named {directory.name}")


def _is_committed(directory: Path, sealed: Manifest) -> bool:
    """True if exactly this manifest is committed in the directory already. Raises ``CheckpointError`` (``checkpoint-exists``)
    if another one is."""
    if not (directory / MANIFEST_NAME).exists():
        return False
    there = read_manifest(directory)
    if there.digest != sealed.digest:
        raise CheckpointError(
            f"{directory} is already committed with digest {there.digest}: it is not replaced", code=EXISTS
        )
    return True


def _retract_manifest(path: Path, error: OSError) -> CheckpointError:
    """Try to remove a new manifest whose commit failed with ``error``, and return the error to raise. A loss of power may bring
    the manifest back."""
    try:
        # it is not known to be durable; a second sync would prove nothing, since the system reports such an error
        # once
        path.unlink(missing_ok=True)
    except OSError as refused:
        reason = (
            f"checkpoint file {path} was renamed into place, but the system could not make the rename durable "
            f"({error.strerror or error}) or remove the file again ({refused.strerror or refused}): it does not count as saved, "
            "but a resume uses it if it is complete. Older checkpoints are untouched."
        )
        return CheckpointError(reason, code=NOT_WRITTEN)
    with suppress(OSError):  # the process that removes the rest syncs first
        fsync_path(path.parent)
    return write_error(path, error)
